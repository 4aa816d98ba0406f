"""Operators of traces as text, and as calls that a real device can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.virtual import trace
from autotune.virtual.operators.calls import arguments_of
from autotune.virtual.recording.tensors import tensors_of
from tests.small import small_tokenizer
from tests.virtual.models import config_of

ROWS = ((36,), (24,))
PLANS = {
    "eager": TrainingPlan("sft", {"per_device_train_batch_size": 2, "bf16": False}, {"attn_implementation": "eager"}),
    "checkpointed": TrainingPlan("sft", {"per_device_train_batch_size": 2, "bf16": False}),
    "packed": TrainingPlan("sft", {"bf16": True, "max_length": 48, "packing": True}),
    "reward": TrainingPlan("reward", {"per_device_train_batch_size": 1, "bf16": False}),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_operator_of_a_traced_step_runs_by_itself_and_gives_tensors_of_the_traced_sizes(name: str) -> None:
    rows = ((36, 24),) if name == "reward" else ROWS
    steps = traced_training(PLANS[name], config_of("llama", num_hidden_layers=1), small_tokenizer(), TracedRows(rows))
    calls = {record.call: record for record in trace(steps, target="cpu").operators if record.call}
    assert len(calls) > 50
    for call, record in calls.items():
        func, args, kwargs = arguments_of(call, torch.device("cpu"))
        with torch.no_grad():
            results = tensors_of(func(*args, **kwargs))
        expected = record.shapes[len(record.shapes) - len(results) :]
        assert tuple(tuple(result.shape) for result in results) == expected, call


def test_tensors_of_a_call_have_its_strides_and_indices_that_are_in_range() -> None:
    tensors = '[{"tensor": [[5, 4], [1, 5], "float32", true]}, {"tensor": [[3], [1], "int64", true]}]'
    _, (weight, indices), _ = arguments_of(f'["aten.embedding.default", {tensors}, {{}}]', torch.device("cpu"))
    assert (weight.shape, weight.stride()) == ((5, 4), (1, 5))
    assert weight.min() >= 0.1
    assert 0 <= int(indices.min()) <= int(indices.max()) < 5


SCATTERED = """["aten.masked_scatter.default", [{"tensor": [[2, 6], [6, 1], "float32", true]},
{"tensor": [[2, 6], [6, 1], "bool", true]}, {"tensor": [[7], [1], "float32", true]}], {}]"""
PUT = """["aten.index_put_.default", [{"tensor": [[2, 5, 3], [15, 3, 1], "float32", true]},
[{"tensor": [[2, 5], [5, 1], "bool", true]}], {"tensor": [[7, 3], [3, 1], "float32", true]}, true], {}]"""


@pytest.mark.parametrize("call", [SCATTERED, PUT])
def test_a_mask_chooses_as_many_elements_as_there_are_values_for(call: str) -> None:
    # A GPU's kernel of another mask fails where nothing can be caught, and no operator runs in that process afterwards.
    func, args, _ = arguments_of(call, torch.device("cpu"))
    mask = args[1][0] if isinstance(args[1], list) else args[1]
    assert int(mask.sum()) == 7
    func(*args)


@pytest.mark.parametrize(
    ("first", "second", "size"), [((40, 3), (5, 3, 2), 40), ((3, 40), (40, 2), 40), ((5, 4, 3), (3, 40), 40)]
)
def test_groups_of_a_product_are_of_equal_size(first: tuple[int, ...], second: tuple[int, ...], size: int) -> None:
    given = [torch.empty(shape) for shape in (first, second)]
    described = [{"tensor": [list(one.shape), list(one.stride()), "bfloat16", True]} for one in given]
    offsets = {"tensor": [[5], [1], "int32", True]}
    _, args, _ = arguments_of(json.dumps(["aten._grouped_mm.default", [*described, offsets], {}]), torch.device("cpu"))
    assert args[2].dtype == torch.int32
    assert args[2].tolist() == [size * group // 5 for group in range(1, 6)]


LIBRARY = """
import torch

@torch.library.custom_op("registers_late::doubled", mutates_args=())
def doubled(given: torch.Tensor) -> torch.Tensor:
    return 2 * given
"""


def test_the_library_of_an_operator_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_late.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    call = '["registers_late.doubled.default", [{"tensor": [[2, 4], [4, 1], "float16", true]}], {}]'
    func, (given,), _ = arguments_of(call, torch.device("cpu"))
    assert torch.equal(func(given), 2 * given)
