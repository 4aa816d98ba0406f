"""What a probe does with vLLM: the parts that need no GPU, and a probe where there is one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import autotune
from autotune.step.trainers.vllm import GivenCompletions, make_long, without_weights
from tests.small import write_rows, write_small_model


def test_vllm_generates_as_many_tokens_as_a_probe_wants() -> None:
    generation = SimpleNamespace(max_completion_length=16, generation_kwargs={"seed": 1})
    make_long(generation, 40)
    assert generation.max_completion_length == 40
    assert generation.generation_kwargs == {"seed": 1, "min_tokens": 40, "ignore_eos": True}


def test_what_stands_for_vllm_gives_completions_of_that_length() -> None:
    given = GivenCompletions(accelerator=SimpleNamespace(device=torch.device("cpu")))
    make_long(given, 3)
    prompts, completions, probabilities, _ = given.generate([[1, 2], [1]], num_generations=2)
    assert prompts == [[1, 2], [1]]
    assert [len(ids) for ids in completions] == [3, 3]
    assert [len(row) for row in probabilities] == [3, 3]
    assert all(len(token) == 1 for row in probabilities for token in row)


def test_vllm_starts_without_reading_weights() -> None:
    module: Any = ModuleType("trl.generation.vllm_generation")
    module.LLM = lambda **given: given
    with without_weights(module):
        assert module.LLM(model="x") == {"model": "x", "load_format": "dummy"}
    assert module.LLM(model="x") == {"model": "x"}
    with without_weights(ModuleType("without vllm")):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm 0.22 to 0.31, which is not installed")
@pytest.mark.parametrize("vllm", ["colocate", "colocate-sleep"])
def test_a_probe_with_vllm_measures_both(vllm: str, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4, hidden_size=256)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"token {number} of"} for number in range(64)])
    found = autotune.probe(
        str(model), str(rows), trainer="grpo", device="cuda", trials=2, output=tmp_path / "out",
        fix={"vllm": vllm, "vllm_gpu_memory_utilization": "0.3", "max_completion_length": 32},
    )  # fmt: skip
    assert found.recommended is not None
