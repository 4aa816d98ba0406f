"""Probes with two real ranks on the CPU: the planned engine, failures with their rank, and gathered saves."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.jobs.exchange import write_reply
from autotune.core.jobs.protocol import RANK_FOLDER, Job, ProbeRequest
from autotune.core.jobs.traced import TraceRequest
from autotune.core.measurement import Measurement
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.program import SAVE
from autotune.core.status import ProbeStatus
from autotune.core.workload import ModelSource, Workload
from autotune.probing import JobServer, probe, server, trace
from autotune.step.distributed.group import planned_engine
from autotune.step.job import JobContext
from autotune.step.jobs.probe import probe as real_probe
from autotune.units import MIB
from tests.probing.processes import running, timed_from, wait_until
from tests.settings import TWO, machine_with, plan_with, setting
from tests.step.plans import fsdp2, needs_deepspeed, zero
from tests.step.requests import BRIEF, probe_request, token_workload
from tests.virtual.alone import JOB, Pickled

PIDS = "pids"
ENGINES = [
    ({}, "DDP"),
    ({"sharding": "fsdp2"}, "FSDP2"),
    pytest.param({"sharding": "fsdp2", "reshard_after_forward": "off"}, "FSDP2", marks=pytest.mark.nightly),
    pytest.param({"sharding": "fsdp2", "sync_each_batch": "on"}, "FSDP2", marks=pytest.mark.nightly),
    pytest.param({"sharding": "zero2"}, "DeepSpeed's ZeRO stage 2", marks=needs_deepspeed),
    pytest.param({"sharding": "zero3", "offload": "both"}, "DeepSpeed's ZeRO stage 3", marks=needs_deepspeed),
    *(
        pytest.param(choices, engine, marks=[needs_deepspeed, pytest.mark.nightly])
        for choices, engine in [
            ({"sharding": "zero1"}, "DeepSpeed's ZeRO stage 1"),
            ({"sharding": "zero2", "offload": "optimizer"}, "DeepSpeed's ZeRO stage 2"),
            ({"sharding": "zero3", "stage3_max_live_parameters": 1000}, "DeepSpeed's ZeRO stage 3"),
        ]
    ),
]
ROWS = [64, 60, 30, 50, 64, 20, 10, 33]


def planned(**choices: str | int) -> TrainingPlan:
    """Return a plan of two processes, each with two micro-batches of two short rows in a step."""
    sizes: dict[str, str | int] = {"per_device_train_batch_size": 2, "max_length": 64, "precision": "float32"}
    return plan_with(setting(machine=TWO), {**sizes, **choices})


# Probes that behave otherwise; what they do is chosen by the seed of the request.
_SILENT, _KILLED, _HELD, _UPDATE, _WATCHED, _SLOW, _HUNG = range(101, 108)
_REDUCED_SECONDS = 0.3


def _behave(request: ProbeRequest, context: JobContext) -> Measurement:
    folder = context.folder.parent
    (folder / f"{PIDS}-{os.environ['RANK']}").write_text(str(os.getpid()))
    # A rank that fails ends the others, which may not have come as far as this.
    assert wait_until(
        lambda: sum(bool(file.stat().st_size) for file in folder.glob(f"{PIDS}-*")) == int(os.environ["WORLD_SIZE"])
    )
    training: Any = importlib.import_module("autotune.step.run.training")
    if request.seed == _SILENT:
        # What accelerate does on a CPU if nothing keeps it from it.
        training.on_device = lambda *given: given[-1]()
    elif request.seed == _KILLED and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    elif request.seed == _HELD and os.environ["RANK"] == "1":
        request = replace(request, limit_bytes=MIB)
    elif request.seed == _UPDATE:
        optimizer: Any = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
        optimizer.step = _run_out
    elif request.seed == _HUNG:
        time.sleep(600)
    elif request.seed == _WATCHED:
        return _watched(request, context)
    elif request.seed == _SLOW:
        _slow_where_reduced()
    return real_probe(request, context)


def _slow_where_reduced() -> None:
    """Let the reduction of gradients take time, and nothing else, by a clock of its own."""
    accelerator: Any = importlib.import_module("accelerate").Accelerator
    backward, now = accelerator.backward, [time.monotonic()]

    def slow(self: Any, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)
        now[0] += _REDUCED_SECONDS * self.sync_gradients

    accelerator.backward = slow
    for name in ("instrument", "meters", "progress"):
        timing: Any = importlib.import_module(f"autotune.step.run.{name}")
        timing.time = SimpleNamespace(monotonic=lambda: now[0])


def _run_out(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return token_workload(tmp_path, ROWS)


@pytest.fixture
def misbehaving(job_server: JobServer, monkeypatch: pytest.MonkeyPatch) -> JobServer:
    """The server of all tests, whose probes behave as the seeds of their requests say."""
    send = server.send_request

    def sent(job: str, request: object, folder: Path) -> float:
        return send(JOB, Pickled.of(_behave, request), folder) if job == Job.PROBE else send(job, request, folder)

    monkeypatch.setattr(server, "send_request", sent)
    return job_server


@pytest.mark.parametrize(("choices", "engine"), ENGINES, ids=str)
def test_two_ranks_train_with_the_engine_that_was_planned(
    job_server: JobServer, workload: Workload, tmp_path: Path, choices: Mapping[str, str | int], engine: str
) -> None:
    found = probe(job_server, probe_request(workload, planned(**choices)), tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.OK, found.reason
    assert found.documents_per_step == 8
    assert found.worst_tokens == 2 * 64
    for rank in range(2):
        assert f"{engine} with 2 processes" in (tmp_path / "probe" / f"rank-{rank}" / "log.txt").read_text()


@pytest.mark.nightly
def test_two_compiled_ranks_are_trained_by_ddp(job_server: JobServer, tmp_path: Path) -> None:
    # Rows of one length: each further one is compiled for.
    workload, plan = token_workload(tmp_path, [64] * 8, num_hidden_layers=1), planned()
    plan = replace(plan, args={**plan.args, "torch_compile": True, "torch_compile_backend": "eager"})
    found = probe(job_server, probe_request(workload, plan), tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.OK, found.reason


def test_a_probe_counts_the_reduction_of_gradients_once_per_step(
    misbehaving: JobServer, workload: Workload, tmp_path: Path
) -> None:
    schedule = replace(BRIEF, min_micro_batches=8, max_micro_batches=8)
    plan = planned()
    plan = replace(plan, args={**plan.args, "gradient_accumulation_steps": 8})
    request = replace(probe_request(workload, plan, schedule=schedule), seed=_SLOW)
    found = probe(misbehaving, request, tmp_path / "probe", timeout_seconds=300.0)
    assert found.step_seconds == pytest.approx(_REDUCED_SECONDS), found.reason


@pytest.mark.nightly
def test_four_ranks_train_two_replicas(job_server: JobServer, workload: Workload, tmp_path: Path) -> None:
    four = machine_with(TWO, processes=4)
    choices: dict[str, str | int] = {"sharding": "fsdp2", "dp_replicate_size": 2, "per_device_train_batch_size": 1}
    plan = plan_with(setting(machine=four), {**choices, "max_length": 64, "precision": "float32"})
    found = probe(job_server, probe_request(workload, plan), tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.OK, found.reason
    assert found.documents_per_step == 8
    for rank in range(4):
        log = (tmp_path / "probe" / f"rank-{rank}" / "log.txt").read_text()
        assert "Trained by FSDP2 with 4 processes, 2 replicas." in log


def test_a_plan_names_the_groups_that_its_run_is_held_to() -> None:
    def named(**sizes: int) -> str:
        args = {"fsdp": True, "parallelism_config": sizes}
        return planned_engine(TrainingPlan("sft", args, launch=Launch(8)))

    assert named(cp_size=2, dp_shard_size=4) == "FSDP2 with 8 processes, 2 to a row"
    assert named(cp_size=2, dp_shard_size=2, dp_replicate_size=2) == "FSDP2 with 8 processes, 2 replicas, 2 to a row"


@pytest.mark.nightly
@needs_deepspeed
@pytest.mark.parametrize(("sharding", "offload"), [("zero2", "optimizer"), ("zero3", "both")])
def test_one_process_that_offloads_is_a_group_of_its_own(
    job_server: JobServer, workload: Workload, tmp_path: Path, sharding: str, offload: str
) -> None:
    plan = replace(planned(sharding=sharding, offload=offload), launch=Launch(1))
    found = probe(job_server, probe_request(workload, plan), tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.OK, found.reason
    assert f"ZeRO stage {sharding[-1]} with 1 process" in (tmp_path / "probe" / "log.txt").read_text()


@pytest.mark.nightly
def test_an_engine_that_a_library_silently_replaces_is_unsupported(
    misbehaving: JobServer, workload: Workload, tmp_path: Path
) -> None:
    request = replace(probe_request(workload, planned(sharding="fsdp2")), seed=_SILENT)
    found = probe(misbehaving, request, tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.UNSUPPORTED
    assert "FSDP2 with 2 processes was planned, and DDP with 2 processes runs" in found.reason


@pytest.mark.parametrize(
    ("seed", "status", "reason"),
    [
        (_KILLED, ProbeStatus.CRASHED, "twice rank 1: killed by signal 9 (SIGKILL)"),
        (_HELD, ProbeStatus.OUT_OF_MEMORY, "rank 1: in construction: "),
    ],
)
def test_one_rank_s_failure_ends_the_group_and_is_the_measurement(
    misbehaving: JobServer, workload: Workload, tmp_path: Path, seed: int, status: ProbeStatus, reason: str
) -> None:
    request = replace(probe_request(workload, planned()), seed=seed)
    for rank in range(2):
        # What an earlier try in this folder ended with is no measurement of this one.
        earlier = tmp_path / "probe" / RANK_FOLDER.format(rank=rank)
        earlier.mkdir(parents=True)
        write_reply(earlier, Measurement(ProbeStatus.OK, peak_bytes=1))
    found = probe(misbehaving, request, tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is status
    assert found.reason.startswith(reason)
    pids = [int((tmp_path / "probe" / f"{PIDS}-{rank}").read_text()) for rank in range(2)]
    assert wait_until(lambda: not running(pids))


@needs_deepspeed
def test_an_optimizer_that_deepspeed_calls_in_the_backward_pass_is_no_part_of_a_micro_batch(
    misbehaving: JobServer, workload: Workload, tmp_path: Path
) -> None:
    request = replace(probe_request(workload, planned(sharding="zero2")), seed=_UPDATE)
    found = probe(misbehaving, request, tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.OUT_OF_MEMORY
    assert "in optimizer step: MemoryError" in found.reason


def test_a_timeout_ends_all_ranks(misbehaving: JobServer, workload: Workload, tmp_path: Path) -> None:
    request = replace(probe_request(workload, planned()), seed=_HUNG)
    files = [tmp_path / "probe" / f"{PIDS}-{rank}" for rank in range(2)]
    with timed_from(*files):
        found = probe(misbehaving, request, tmp_path / "probe", timeout_seconds=0.1)
    assert found.status is ProbeStatus.TIMEOUT
    assert wait_until(lambda: not running(int(file.read_text()) for file in files))


HELD = "held.json"
RANKS, LENGTH = 2, 32
# Bytes of the optimizer's counts of steps, which lie on the host.
_SCALARS = 1024
GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}


def _watched(request: ProbeRequest, context: JobContext) -> Measurement:
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
    args: dict[str, Any], misbehaving: JobServer, job_server: JobServer, tmp_path: Path
) -> None:
    workload = token_workload(tmp_path, [LENGTH] * 8, hidden_size=256)
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": LENGTH}
    plan = TrainingPlan("sft", {**sizes, "bf16": False, "gradient_checkpointing": False, **args}, launch=Launch(RANKS))

    on_cpu = replace(plan, args={"use_cpu": True, **plan.args})
    request = probe_request(workload, on_cpu, schedule=replace(BRIEF, saves=True))
    found = probe(misbehaving, replace(request, seed=_WATCHED), tmp_path / "probe", timeout_seconds=300.0)
    assert found.status is ProbeStatus.OK, found.reason
    real = [json.loads((tmp_path / "probe" / f"rank-{rank}" / HELD).read_text()) for rank in range(RANKS)]

    reply = trace(
        job_server, TraceRequest(plan, ModelSource(workload.model.name), "cuda", worst=((LENGTH,),)), tmp_path / "trace"
    )
    saving = next(section for section in reply.sections if section.part.phase == SAVE)
    traced = [saving.host_bytes, saving.machine_bytes - saving.host_bytes]
    # DeepSpeed's ranks copy their own shards of the optimizer's state second_widths, one after another.
    shard = 4 * workload.model.parameters // RANKS
    for of_trace, of_run in zip(traced, real, strict=True):
        most = 1.01 * of_run + (shard if "deepspeed" in args else 0)
        assert 0.99 * of_run <= of_trace <= most + _SCALARS
    assert max(real) > 0
