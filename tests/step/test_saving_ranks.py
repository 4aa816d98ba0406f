"""What a save gathers on each rank: traces against what two real ranks on the CPU hold of the state that they save."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.plan import Launch, TrainingPlan
from autotune.core.program import SAVE
from autotune.core.protocol import Job, PrepareRequest, ProbeReply, ProbeRequest
from autotune.core.status import ProbeStatus
from autotune.core.traced import TraceRequest
from autotune.core.workload import DatasetSource, ModelSource
from autotune.probing import JobServer, prepare, probe, trace
from autotune.step.job import JobContext, JobType
from autotune.step.jobs.probe import probe as real_probe
from autotune.step.jobs.probe import processes_of, succeeded
from tests.small import write_rows, write_small_model
from tests.step.plans import fsdp2, needs_deepspeed, zero
from tests.step.requests import BRIEF, probe_request

MODULE = "tests.step.test_saving_ranks"
HELD = "held.json"
RANKS, LENGTH = 2, 32
# Bytes of the optimizer's counts of steps, which lie on the host.
_SCALARS = 1024
GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}


def _watched(request: ProbeRequest, context: JobContext) -> ProbeReply:
    """Run a probe, and write down the bytes of the largest state that this rank was given to save."""
    most = [0]

    def watch(module: Any, name: str) -> None:
        given: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            state = given(*args, **kwargs)
            most[0] = max(most[0], _bytes_of(state))
            return state

        setattr(module, name, watched)

    watch(importlib.import_module("accelerate").Accelerator, "get_state_dict")
    watch(importlib.import_module("torch.distributed.checkpoint.state_dict"), "get_optimizer_state_dict")
    reply = real_probe(request, context)
    (context.folder / HELD).write_text(json.dumps(most[0]), encoding="utf-8")
    return reply


def _bytes_of(state: object) -> int:
    torch: Any = importlib.import_module("torch")
    leaves = importlib.import_module("torch.utils._pytree").tree_leaves(state)
    storages = {leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


JOBS = {Job.PROBE: JobType(ProbeRequest, _watched, processes_of, succeeded)}


@pytest.fixture(scope="module")
def watching() -> Iterator[JobServer]:
    with JobServer("cpu", threads=1, jobs_module=MODULE) as server:
        yield server


@pytest.mark.nightly
@pytest.mark.parametrize(
    "args",
    [
        fsdp2(),
        pytest.param(zero(2), marks=needs_deepspeed),
        pytest.param(zero(3, **GATHERED), marks=needs_deepspeed),
    ],
    ids=["fsdp2", "zero2", "zero3"],
)
def test_each_rank_holds_what_was_traced_of_a_checkpoint(
    args: dict[str, Any], watching: JobServer, job_server: JobServer, tmp_path: Path
) -> None:
    source = ModelSource(str(write_small_model(tmp_path / "model", weights=False, hidden_size=256)))
    rows = DatasetSource("rows", "json", str(write_rows(tmp_path / "rows.jsonl", [{"input_ids": [7] * LENGTH}] * 8)))
    workload = prepare(job_server, PrepareRequest(source, rows, "sft", str(tmp_path / "tokens")), tmp_path / "prepare")
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": LENGTH}
    plan = TrainingPlan("sft", {**sizes, "bf16": False, "gradient_checkpointing": False, **args}, launch=Launch(RANKS))

    on_cpu = replace(plan, args={"use_cpu": True, **plan.args})
    request = probe_request(workload, on_cpu, schedule=replace(BRIEF, saves=True))
    found = probe(watching, request, tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.OK, found.reason
    real = [json.loads((tmp_path / "probe" / f"rank-{rank}" / HELD).read_text()) for rank in range(RANKS)]

    reply = trace(job_server, TraceRequest(plan, source, "cuda", worst=((LENGTH,),)), tmp_path / "trace")
    saving = next(section for section in reply.sections if section.part.phase == SAVE)
    traced = [saving.host_bytes, saving.machine_bytes - saving.host_bytes]
    # DeepSpeed's ranks copy their own shards of the optimizer's state besides, one after another.
    shard = 4 * workload.model.parameters // RANKS
    for of_trace, of_run in zip(traced, real, strict=True):
        most = 1.01 * of_run + (shard if "deepspeed" in args else 0)
        assert 0.99 * of_run <= of_trace <= most + _SCALARS
    assert max(real) > 0
