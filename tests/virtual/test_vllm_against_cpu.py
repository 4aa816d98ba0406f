"""Trainings with completions of vLLM, without vLLM: traced peaks equal the CPU's, and traces generate nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from autotune.core.jobs.traced import TraceRequest
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.probing import trace as trace_job
from autotune.probing.server import Worker
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.trainers import find_trainer
from autotune.trainers.distillation import TEACHER
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION, NO_REWARD, SYNCHRONISATION
from autotune.virtual import trace
from autotune.virtual.recording.records import Trace
from autotune.virtual.steps.phases import step_name
from autotune.virtual.steps.sections import sections
from tests.small import VOCABULARY, small_config, small_tokenizer, write_small_model
from tests.step.plans import needs_deepspeed, zero
from tests.virtual.reference import RealPhase, run_on_cpu

SHAPE = Shape(2, 32, 8)
SIZES: dict[str, dict[str, object]] = {
    "grpo": {"beta": 0.0, "num_generations": 2, "max_completion_length": 8},
    "rloo": {"beta": 0.0, "num_generations": 2, "max_completion_length": 8},
    "online_dpo": {"max_new_tokens": 8, "max_length": 32},
    # Its trainer looks for vLLM itself, which is not installed here.
    "distillation": {"max_completion_length": 8},
}
# RLOO and distillation have vLLM generate as GRPO does (TRL's ``VLLMGeneration``).
TRAINERS = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) if name in ("rloo", "distillation") else name for name in SIZES],
)
# TRL has two ways to send weights: online DPO's own, and that of the others.
MERGES = pytest.mark.parametrize(
    "name",
    ["grpo", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("online_dpo", "rloo", "distillation"))],
)


@cache
def teacher() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="teacher")
    small_config().save_pretrained(folder.name)
    return folder


def plan_of(name: str, more: Mapping[str, object], words: Mapping[str, object], ranks: int = 1) -> TrainingPlan:
    args: dict[str, object] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": False, "optim": "adamw_torch",
        "gradient_checkpointing": False, **SIZES[name], **more,
    }  # fmt: skip
    if find_trainer(name).has_teacher:
        args[TEACHER] = teacher().name
    return TrainingPlan(name, args, words, rewards=(NO_REWARD,), launch=Launch(ranks))


def steps_of(name: str, more: Mapping[str, object], words: Mapping[str, object] | None = None) -> Any:
    trainer = find_trainer(name)
    traced = trainer.traced_plan(plan_of(name, more, words or {}), Layout.PADDED, SHAPE)
    rows = TracedRows(trainer.traced_rows(Layout.PADDED, SHAPE, 1.0))
    return traced_training(traced, small_config(), small_tokenizer(), rows)


COLOCATED: dict[str, object] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}


@cache
def with_vllm(name: str) -> Trace:
    return trace(steps_of(name, COLOCATED), target="cpu")


@cache
def without_vllm() -> Trace:
    return trace(steps_of("grpo", {}), target="cpu")


@cache
def on_cpu(name: str) -> dict[str, RealPhase]:
    return run_on_cpu(steps_of(name, COLOCATED), phases=("optimizer step", GENERATION))


@pytest.mark.parametrize("name", ["grpo", pytest.param("rloo", marks=pytest.mark.nightly)])
def test_traced_peaks_are_those_of_the_cpu(name: str) -> None:
    traced, real = with_vllm(name), on_cpu(name)
    for number in (0, 1):
        found, expected = traced.phase(step_name(number)).device_peak.bytes, real[step_name(number)].peak_bytes
        assert abs(found / expected - 1) <= 0.01, f"step {number}: peak {found} for {expected}"


@TRAINERS
def test_traces_and_estimates_hold_while_vllm_generates_what_training_holds_on_the_cpu(name: str) -> None:
    traced, real = with_vllm(name), on_cpu(name)
    first = next(phase for phase in traced.phases if phase.name == GENERATION)
    assert first.device_peak.bytes == pytest.approx(real[GENERATION].peak_bytes, rel=0.01)
    known = find_trainer(name).program(plan_of(name, COLOCATED, {}))
    # The real run is measured in its first generation.
    spans = sections(traced, traced.phase(step_name(0)), known)
    parts = [section for section, _ in spans]
    found = next(section for section in parts if section.part.phase == GENERATION)
    assert max(found.totals) == pytest.approx(real[GENERATION].peak_bytes, rel=0.01)


@TRAINERS
def test_the_model_generates_nothing_in_the_trace(name: str) -> None:
    def passes(found: Trace) -> int:
        spans = [slice(phase.first_operator, phase.end_operator) for phase in found.phases if phase.name == GENERATION]
        return sum("embedding" in operator.name for span in spans for operator in found.operators[span])

    assert passes(with_vllm(name)) == 0 < passes(without_vllm())


def test_grpo_computes_old_log_probabilities_of_what_vllm_generated() -> None:
    uncorrected = trace(steps_of("grpo", {**COLOCATED, "vllm_importance_sampling_correction": False}), target="cpu")
    assert OLD_PASS in {phase.name for phase in with_vllm("grpo").phases}
    assert OLD_PASS not in {phase.name for phase in uncorrected.phases}


LORA: dict[str, object] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}


@MERGES
def test_merging_adapters_for_vllm_needs_what_it_needs_on_the_cpu(name: str) -> None:
    steps = steps_of(name, COLOCATED, LORA)
    real = run_on_cpu(steps, phases=("optimizer step", GENERATION))
    first = next(phase for phase in trace(steps, target="cpu").phases if phase.name == GENERATION)
    assert first.device_peak.bytes == pytest.approx(real[GENERATION].peak_bytes, rel=0.01)


@pytest.mark.nightly
@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("name", list(SIZES))
@pytest.mark.parametrize("words", [LORA, {}], ids=["adapters", "no adapters"])
def test_zero_3_gathers_all_weights_at_once_to_merge_adapters_for_vllm(
    name: str, words: dict[str, object], worker: Worker, tmp_path: Path
) -> None:
    # TRL: `_iter_named_params`; of online DPO, `_move_model_to_vllm_inner`.
    folder = tmp_path / "model"
    model = write_small_model(folder, weights=False, num_hidden_layers=2, hidden_size=256, intermediate_size=768)
    whole = 2 * sum(2 * 256**2 + 256**2 + 3 * 256 * 768 for _ in range(2))
    plan = plan_of(name, {**COLOCATED, **zero(3), "bf16": True}, {**words, "dtype": "bfloat16"}, 8)
    known = find_trainer(name)
    traced = known.traced_plan(plan, Layout.PADDED, SHAPE)
    rows = known.traced_rows(Layout.PADDED, SHAPE, 1.0)
    request = TraceRequest(traced, ModelSource(str(model)), "cuda", rows, gpu=find_gpu("A100-80GB"))
    reply = trace_job(worker, request, tmp_path / "job")
    held = {found.part.phase: max(found.totals) for found in reply.sections}
    highest = held[SYNCHRONISATION] - held[GENERATION]
    # Without adapters, one weight after another: the largest is the embedding.
    assert highest > 0.8 * whole if words else 0.9 * 2 * VOCABULARY * 256 < highest < 0.5 * whole


def test_sleep_mode_is_the_same_training() -> None:
    args = {**SIZES["grpo"], **COLOCATED, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    traced = {
        find_trainer("grpo").traced_plan(TrainingPlan("grpo", {**args, **more}), Layout.PADDED, SHAPE).fingerprint
        for more in ({}, {"vllm_enable_sleep_mode": True}, {"vllm_gpu_memory_utilization": 0.8})
    }
    assert len(traced) == 1
