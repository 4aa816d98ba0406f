"""Every trainer on a real GPU: its default, choices that need a GPU, and a cycle of generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.core.candidate import Candidate, Choice
from autotune.core.measurement import Measurement, Schedule
from autotune.core.setting import GLOBAL_BATCH, Setting
from autotune.core.status import ProbeStatus
from autotune.inspection.machine import machine as inspect_machine
from autotune.probing import JobServer, probe
from autotune.trainers import find_trainer, trainers
from autotune.trainers.prompts import GENERATION
from tests.settings import problem, separates
from tests.trainers.prepared import Prepare, Prepared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

BRIEF = Schedule(warmup_micro_batches=0, min_micro_batches=2, max_micro_batches=2, max_seconds=60.0, saves=True)
QLORA = {"lora": "r16", "quantization": "4bit-nf4"}
OFFLOADED = {"gradient_checkpointing": "off", "activation_offloading": "on"}
CHOICES: tuple[tuple[str, Mapping[str, Choice]], ...] = (
    *((name, {}) for name in trainers()),
    ("sft", QLORA),
    ("dpo", QLORA),
    ("grpo", QLORA),
    ("sft", {"liger": "on"}),
    ("dpo", {"liger": "on"}),
    ("grpo", {"liger": "on"}),
    ("sft", OFFLOADED),
    ("kto", OFFLOADED),
    ("sft", {"attention": "flex_attention"}),
    ("sft", {"allocator": "expandable_segments"}),
)


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    with JobServer("cuda") as started:
        yield started


def on_this_gpu(found: Prepared) -> Setting:
    """Return the setting of sample rows on the GPU of this machine, where all that it can do is allowed."""
    attentions = ("sdpa", "flex_attention")
    workload = replace(found.setting.workload, packing_checks={name: separates(name) for name in attentions})
    allowed = frozenset({GLOBAL_BATCH, *(technique.name for technique in found.trainer.techniques)})
    return replace(found.setting, workload=workload, machine=inspect_machine("cuda"), allowed=allowed)


def candidate_of(found: Prepared, setting: Setting, choices: Mapping[str, Choice]) -> Candidate:
    baseline = problem(setting, trainer=found.trainer.name).baseline
    candidate = found.trainer.normal(baseline.but(**choices), setting)
    why_not = found.trainer.illegal(candidate, setting)
    if why_not is not None:
        pytest.skip(why_not)
    return candidate


def probed(server: JobServer, found: Prepared, folder: Path, choices: Mapping[str, Choice]) -> Measurement:
    setting = on_this_gpu(found)
    plan = found.trainer.plan(candidate_of(found, setting, choices), setting)
    return probe(server, replace(found.request(plan, BRIEF), device="cuda"), folder, timeout_seconds=800.0)


@pytest.mark.parametrize(
    ("name", "choices"),
    CHOICES,
    ids=["-".join([name, *(f"{knob}={choice}" for knob, choice in choices.items())]) for name, choices in CHOICES],
)
def test_every_phase_of_a_step_has_its_peak(
    server: JobServer, prepared: Prepare, tmp_path: Path, name: str, choices: Mapping[str, Choice]
) -> None:
    trainer = find_trainer(name)
    found = prepared(trainer, trainer.formats[-1].name)
    shown = probed(server, found, tmp_path, choices)
    assert (shown.status, shown.reason) == (ProbeStatus.OK, "")
    setting = on_this_gpu(found)
    plan = trainer.plan(candidate_of(found, setting, choices), setting)
    geometry = found.geometry(plan)
    assert set(shown.peaks) == set(trainer.program(plan).phases)
    assert shown.worst_tokens == geometry.worst.rows * geometry.worst.tokens * geometry.sequences
    assert shown.peak_bytes is not None
    assert shown.reserved_bytes is not None
    assert 0 < max(shown.peaks.values()) <= shown.peak_bytes <= shown.reserved_bytes
    assert shown.tokens_per_second


# Online DPO generates in each micro-batch, whose time includes it.
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_cycle_of_generation_is_timed_apart_from_training(
    server: JobServer, prepared: Prepare, tmp_path: Path, name: str
) -> None:
    trainer = find_trainer(name)
    shown = probed(server, prepared(trainer, trainer.formats[-1].name), tmp_path, {})
    assert shown.ok, shown.reason
    assert shown.peaks[GENERATION] > 0
    assert shown.step_seconds is not None
    assert 0 < shown.generation_phases[GENERATION] <= shown.generation_seconds < shown.step_seconds
