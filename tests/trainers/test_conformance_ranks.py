"""Conformance of every trainer with several processes: documents per step, epochs, engines, shared rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from autotune.core.candidate import Choice
from autotune.core.measurement import Measurement
from autotune.core.plan import TrainingPlan
from autotune.core.program import SAVE
from autotune.core.status import ProbeStatus
from autotune.probing import JobServer, probe
from autotune.step.objects import parallelism_config
from autotune.trainers import find_trainer, trainers
from autotune.trainers.base import Trainer
from tests.emit.test_launch import HERE, LONG
from tests.settings import TWO, plan_with, problem
from tests.step.plans import needs_deepspeed
from tests.step.requests import BRIEF
from tests.trainers.prepared import Prepare, Prepared


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
    assert {*shown.peaks, SAVE} == set(trainer.program(found.plan({})).phases)


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


PROCESSES = HERE.machine.hardware.processes
STEPS = 2


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of as many ranks as a plan has, of which accelerate makes its mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


def dealt(plan: TrainingPlan, sizes: ParallelismConfig, rank: int) -> list[tuple[int, ...]]:
    """Return the documents that accelerate deals out to a rank in each of some optimizer steps."""
    rows, micro_batches = (
        int(str(plan.args[name])) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    loader = prepare_data_loader(
        DataLoader(range(STEPS * HERE.global_batch_size), batch_size=rows),
        device=torch.device("cpu"),
        num_processes=PROCESSES,
        process_index=rank,
        torch_device_mesh=sizes.build_device_mesh("cpu"),
    )
    found = [tuple(batch.tolist()) for batch in loader]
    assert len(found) == STEPS * micro_batches
    return [sum(found[at : at + micro_batches], ()) for at in range(0, len(found), micro_batches)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("shared", "replicas"), [(2, 1), (8, 1), (1, 4), (2, 2), (4, 2), (16, 1)])
def test_an_optimizer_step_has_the_global_batch_over_the_processes_with_rows_of_their_own(
    shared: int, replicas: int
) -> None:
    # Groups of 16 are no choice; the rule is the same for them.
    of_groups: dict[str, Choice] = {"sharding": "fsdp2", "context_parallel": shared, "dp_replicate_size": replicas}
    of_rows: dict[str, Choice] = {"max_length": 9000, "pad_to_multiple_of": 64, "per_device_train_batch_size": 2}
    plan = plan_with(HERE, of_groups | of_rows)
    ranks = [dealt(plan, parallelism_config(plan.parallelism), rank) for rank in range(PROCESSES)]

    assert len({tuple(documents) for documents in ranks}) == plan.data_ranks == PROCESSES // shared
    for step in range(STEPS):
        in_step = [document for documents in {rank[step] for rank in ranks} for document in documents]
        assert len(in_step) == len(set(in_step)) == HERE.global_batch_size
    geometry = find_trainer("sft").geometry(plan, LONG.dataset.documents)
    assert geometry.documents == HERE.global_batch_size
    assert geometry.tokens_per_step == pytest.approx(HERE.global_batch_size * LONG.dataset.lengths.tokens / 51)
