"""What holds for every trainer with two real ranks: documents per step, rows of an epoch, and the engines it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.candidate import Choice
from autotune.core.measurement import Measurement
from autotune.core.program import SAVE
from autotune.core.status import ProbeStatus
from autotune.probing import JobServer, probe
from autotune.trainers import Trainer, find_trainer, trainers
from tests.settings import TWO, problem
from tests.step.plans import needs_deepspeed
from tests.step.requests import BRIEF
from tests.trainers.prepared import Prepared

Prepare = Callable[[Trainer, str], Prepared]


def probed(server: JobServer, found: Prepared, folder: Path, choices: Mapping[str, Choice]) -> Measurement:
    """Return the measurement of a plan on two ranks."""
    here = replace(found.setting, machine=TWO)
    candidate = found.trainer.normal(problem(here, trainer=found.trainer.name).baseline.but(**choices), here)
    assert found.trainer.illegal(candidate, here) is None
    plan = found.trainer.plan(candidate, here)
    shown = probe(server, found.request(plan, BRIEF), folder, timeout_seconds=300.0)
    assert shown.status is ProbeStatus.OK, shown.reason
    said = found.geometry(plan)
    assert said.documents == pytest.approx(here.global_batch_size, rel=0.1)
    assert shown.documents_per_step == pytest.approx(said.documents)
    assert shown.tokens_per_step == pytest.approx(2 * said.tokens * said.micro_batches)
    assert shown.worst_tokens == said.worst.rows * said.worst.tokens * said.sequences
    return shown


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda item: item.name)
def test_two_ranks_share_an_optimizer_step_out(
    trainer: Trainer, prepared: Prepare, job_server: JobServer, tmp_path: Path
) -> None:
    found = prepared(trainer, trainer.formats[-1].name)
    shown = probed(job_server, found, tmp_path, {"per_device_train_batch_size": 4})
    assert {*shown.peaks, SAVE} == {phase.name for phase in trainer.program(found.plan({})).phases}


@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("dpo", {"sharding": "fsdp2"}),
        pytest.param("dpo", {"sharding": "zero3"}, marks=pytest.mark.nightly),
        pytest.param("dpo", {"sharding": "fsdp2", "reference": "precomputed"}, marks=pytest.mark.nightly),
        pytest.param("kto", {"sharding": "fsdp2", "reference": "precomputed"}, marks=pytest.mark.nightly),
        pytest.param("kto", {"sharding": "zero2", "reference": "precomputed"}, marks=pytest.mark.nightly),
        pytest.param("grpo", {"sharding": "zero3"}, marks=pytest.mark.nightly),
        pytest.param("grpo", {"sharding": "zero3", "ds3_gather_for_generation": "off"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_weights_are_shared_out_where_there_is_a_reference_and_where_completions_are_generated(
    name: str, choices: Mapping[str, Choice], prepared: Prepare, job_server: JobServer, tmp_path: Path
) -> None:
    trainer = find_trainer(name)
    found = prepared(trainer, trainer.formats[-1].name)
    probed(job_server, found, tmp_path, {"per_device_train_batch_size": 4, **choices})
