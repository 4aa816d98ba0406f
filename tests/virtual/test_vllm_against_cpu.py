"""Trainings that vLLM generates for, without vLLM: traced peaks are the CPU's, and nothing is generated in a trace."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION, NO_REWARD
from autotune.virtual import trace
from autotune.virtual.phases import step_name
from autotune.virtual.records import Trace
from autotune.virtual.sections import sections
from tests.small import small_config, small_tokenizer
from tests.virtual.reference import RealPhase, run_on_cpu

SHAPE = Shape(2, 32, 8)
SIZES: dict[str, dict[str, object]] = {
    "grpo": {"beta": 0.0, "num_generations": 2, "max_completion_length": 8},
    "rloo": {"beta": 0.0, "num_generations": 2, "max_completion_length": 8},
    "online_dpo": {"max_new_tokens": 8, "max_length": 32},
}
TRAINERS = pytest.mark.parametrize("name", list(SIZES))


def plan_of(name: str, **vllm: object) -> TrainingPlan:
    args = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": False, "optim": "adamw_torch",
        "gradient_checkpointing": False, **SIZES[name], **vllm,
    }  # fmt: skip
    return TrainingPlan(name, args, rewards=(NO_REWARD,))


def steps_of(name: str, **vllm: object) -> Any:
    trainer = find_trainer(name)
    traced = trainer.traced_plan(plan_of(name, **vllm), Layout.PADDED, SHAPE)
    rows = TracedRows(trainer.traced_rows(Layout.PADDED, SHAPE, 1.0))
    return traced_training(traced, small_config(), small_tokenizer(), rows)


COLOCATED: dict[str, object] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}


@cache
def with_vllm(name: str) -> Trace:
    return trace(steps_of(name, **COLOCATED), target="cpu")


@cache
def on_cpu(name: str) -> dict[str, RealPhase]:
    return run_on_cpu(steps_of(name, **COLOCATED), phases=("optimizer step", GENERATION))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_traced_peaks_are_those_of_the_cpu(name: str) -> None:
    traced, real = with_vllm(name), on_cpu(name)
    for number in (0, 1):
        found, expected = traced.phase(step_name(number)).device_peak.bytes, real[step_name(number)].peak_bytes
        assert abs(found / expected - 1) <= 0.01, f"step {number}: peak {found} for {expected}"


@TRAINERS
def test_what_training_holds_while_vllm_generates_is_what_the_cpu_holds(name: str) -> None:
    traced, real = with_vllm(name), on_cpu(name)
    first = next(phase for phase in traced.phases if phase.name == GENERATION)
    assert first.device_peak.bytes == pytest.approx(real[GENERATION].peak_bytes, rel=0.01)


@TRAINERS
def test_an_estimate_knows_what_training_holds_while_vllm_generates(name: str) -> None:
    traced, real = with_vllm(name), on_cpu(name)
    known = find_trainer(name).program(plan_of(name, **COLOCATED))
    # The real run is measured in its first generation.
    spans = sections(traced, traced.phase(step_name(0)), of_step=known.apart, leading=known.leading)
    parts = [section for section, _ in spans]
    found = next(section for section in parts if section.part.phase == GENERATION)
    assert max(found.totals) == pytest.approx(real[GENERATION].peak_bytes, rel=0.01)


@TRAINERS
def test_the_model_generates_nothing_in_the_trace(name: str) -> None:
    ran = [
        [phase.end_operator - phase.first_operator for phase in found.phases if phase.name == GENERATION]
        for found in (with_vllm(name), trace(steps_of(name), target="cpu"))
    ]
    assert len(ran[0]) == len(ran[1])
    assert max(ran[0]) <= 12 < min(ran[1])


def test_grpo_computes_old_log_probabilities_of_what_vllm_generated() -> None:
    uncorrected = trace(steps_of("grpo", **COLOCATED, vllm_importance_sampling_correction=False), target="cpu")
    assert OLD_PASS in {phase.name for phase in with_vllm("grpo").phases}
    assert OLD_PASS not in {phase.name for phase in uncorrected.phases}


def test_sleep_mode_is_the_same_training() -> None:
    args = {**SIZES["grpo"], **COLOCATED, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    traced = {
        find_trainer("grpo").traced_plan(TrainingPlan("grpo", {**args, **more}), Layout.PADDED, SHAPE).fingerprint
        for more in ({}, {"vllm_enable_sleep_mode": True}, {"vllm_gpu_memory_utilization": 0.8})
    }
    assert len(traced) == 1
