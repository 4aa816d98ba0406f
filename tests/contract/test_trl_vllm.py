"""Contract with TRL's vLLM: the functions that a trace replaces exist, and ``trl`` reads the written arguments."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest
import yaml

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.step.trainers.vllm import FixedCompletions
from autotune.techniques import find
from autotune.techniques.base import facts
from autotune.trainers import find_trainer
from tests.techniques.test_vllm import PLANNED, here

TRAINERS = pytest.mark.parametrize("name", ["grpo", "rloo", "online_dpo", "distillation"])


def chosen(name: str, at: Setting, **choices: Choice) -> Candidate:
    trainer = find_trainer(name)
    start = trainer.defaults(at)
    return trainer.normal(start.but(**choices), at)


def test_what_stands_for_trl_s_connection_has_its_methods() -> None:
    from trl.generation import vllm_generation as generation

    for method in ("sync_weights", "generate"):
        assert set(inspect.signature(getattr(generation.VLLMGeneration, method)).parameters) >= {"self"}
        assert callable(getattr(FixedCompletions, method))
    assert {"model", "accelerator"} <= inspect.signature(generation.VLLMGeneration.__init__).parameters.keys()
    # Both are set on TRL's object where it generates for real.
    source = inspect.getsource(generation.VLLMGeneration)
    assert "self.max_completion_length" in source
    assert "self.generation_kwargs" in source


@pytest.mark.parametrize("module", ["grpo_trainer", "rloo_trainer", "distillation_trainer"])
def test_trl_s_trainers_have_the_connection_by_that_name(module: str) -> None:
    trainer = importlib.import_module(f"trl.trainer.{module}")
    assert trainer.VLLMGeneration.__module__ == "trl.generation.vllm_generation"


def test_processes_that_share_vllm_gather_their_prompts_unless_it_is_online_dpo_s() -> None:
    from trl.experimental.online_dpo import online_dpo_trainer as online
    from trl.generation import vllm_generation as generation

    assert "all_gather_object(gathered_prompts, prompts, group=self.tp_group)" in inspect.getsource(generation)
    assert "tp_group" not in inspect.getsource(online)
    size = find("vllm_tensor_parallel_size", find_trainer("online_dpo").techniques)
    assert 2 in facts(size, "online_dpo").ignored


def test_the_supported_versions_are_those_that_trl_says() -> None:
    from trl import import_utils as utils

    source = inspect.getsource(utils.is_vllm_available)
    assert 'Version("0.22.0") <= _vllm_base_version <= Version("0.31.0")' in source


@TRAINERS
def test_the_defaults_are_trl_s(name: str, tmp_path: Path) -> None:
    from autotune.step.trainers import find_adapter

    untold = find_adapter(name).config(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    at = dataclasses.replace(here(), workload=dataclasses.replace(here().workload, trainer=name))
    assert float(find("vllm_gpu_memory_utilization", find_trainer(name).techniques).default(at)) == (
        untold.vllm_gpu_memory_utilization
    )
    assert untold.vllm_tensor_parallel_size == 1
    assert untold.use_vllm is False
    assert untold.vllm_mode == "colocate"
    assert getattr(untold, "vllm_max_model_length", None) is None


@pytest.mark.parametrize("name", ["grpo", "rloo", "distillation"])
@pytest.mark.parametrize("vllm", ["off", "server", "colocate", "colocate-sleep"])
def test_trl_s_command_line_reads_what_is_emitted(name: str, vllm: str, tmp_path: Path) -> None:
    import trl

    from autotune.step.trainers import find_adapter

    of = dataclasses.replace(here().workload, trainer=name)
    at = dataclasses.replace(here(PLANNED), workload=of)
    candidate = chosen(name, at, vllm=vllm, vllm_gpu_memory_utilization="0.45")
    args = {key: value for key, value in find_trainer(name).plan(candidate, at).args.items() if "vllm" in key}
    file = tmp_path / "config.yaml"
    text = {"output_dir": str(tmp_path / "out"), "bf16": False, "use_cpu": True, **args}
    file.write_text(yaml.safe_dump(text), encoding="utf-8")

    read = trl.TrlParser((find_adapter(name).config,)).parse_args_and_config(["--config", str(file)])[0]

    assert {key: getattr(read, key) for key in args} == args
    assert read.use_vllm is (vllm != "off")
    assert read.vllm_enable_sleep_mode is (vllm == "colocate-sleep")
