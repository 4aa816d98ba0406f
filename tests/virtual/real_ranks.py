"""Trains on several real ranks on the CPU, and traces each of them, for comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from autotune.core.files.codec import decode, encode
from autotune.core.plan import TrainingPlan
from autotune.probing import JobServer
from autotune.virtual.steps.phases import step_name
from tests.virtual.alone import apart

if TYPE_CHECKING:
    from autotune.step.run.traced_training import TraceFacts

STEPS = (step_name(0), step_name(1))
"""The optimizer steps of a trace."""
WORST = "worst"
"""File of a folder: the rank that holds the most by the partition of the run."""
_CASE = "case.json"
_LONGEST_SECONDS = 280


@dataclass(frozen=True)
class Case:
    """A plan, the configuration of its model, and the rows of its micro-batches.

    Attributes:
        once: whether a trace runs a single step, to which the second is added, as the job does where steps are alike.
    """

    plan: TrainingPlan
    architecture: str
    config: Mapping[str, Any]
    worst: tuple[tuple[int, ...], ...]
    once: bool = False


@dataclass(frozen=True)
class Measured:
    """The bytes of a rank's optimizer step: live storages before it, the most of them in it, and after it."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int


def traced_ranks(server: JobServer, case: Case, ranks: Sequence[int]) -> list[dict[str, Measured]]:
    """Return what the traces of some ranks have, each made on its own, by the name of the step."""
    return [apart(server, _traced, case, rank) for rank in ranks]


def on_ranks(case: Case, folder: Path) -> list[dict[str, Measured]]:
    """Return what each rank measured, by the name of the step, in the order of ranks.

    Args:
        folder: an empty directory.

    Raises:
        AssertionError: a rank failed; the message is what it wrote.
    """
    (folder / _CASE).write_text(json.dumps(encode(case)), encoding="utf-8")
    size = case.plan.launch.processes
    ranks = range(size)
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
              "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    started = []
    for rank in ranks:
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "tests.virtual.real_ranks", str(folder)]
        with (folder / f"log-{rank}.txt").open("wb") as log:
            started.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    try:
        for rank, process in zip(ranks, started, strict=True):
            status = process.wait(timeout=_LONGEST_SECONDS)
            assert status == 0, (folder / f"log-{rank}.txt").read_text(encoding="utf-8")[-4000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
    replies = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in ranks]
    return [{name: decode(Measured, figures) for name, figures in reply.items()} for reply in replies]


def _steps(case: Case, trained: TraceFacts, *, once: bool) -> Callable[[Any], object]:
    """Return the training, which a trace or a run executes on its device."""
    import torch
    import trl.trainer.utils

    from autotune.step.run.traced_training import traced_training
    from autotune.step.run.virtual_trainer import TracedRows
    from tests.small import small_tokenizer
    from tests.virtual.models import config_of

    torch.set_num_threads(1)
    # TRL's tile of 32768 words would be most of a small model's peak and hide every error in the rest.
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = 128
    rows = TracedRows(case.worst, once=once, alike=False)
    return traced_training(case.plan, config_of(case.architecture, **case.config), small_tokenizer(), rows, trained)


def _traced(case: Case, rank: int) -> dict[str, Measured]:
    from autotune.step.run.traced_training import TraceFacts
    from autotune.virtual import trace
    from autotune.virtual.ranks import World
    from autotune.virtual.steps.steady import steady

    steps = _steps(case, TraceFacts(), once=case.once)
    traced = trace(steps, target="cpu", world=World(case.plan.launch.processes, rank))
    if case.once:
        traced = steady(traced, *STEPS, further=False)
    phases = {phase.name: phase for phase in traced.phases if phase.name in STEPS}
    return {
        name: Measured(phase.start_bytes, phase.device_peak.bytes, phase.end_bytes) for name, phase in phases.items()
    }


def _main(folder: Path) -> None:
    """Train as the rank that the environment names, and write what was measured."""
    from autotune.step.distributed.engines import worst_rank
    from autotune.step.run.traced_training import TraceFacts

    case = decode(Case, json.loads((folder / _CASE).read_text(encoding="utf-8")))
    rank, trained = int(os.environ["RANK"]), TraceFacts()
    measured = _real(_steps(case, trained, once=False), case.plan, folder, rank)
    found = {name: encode(figures) for name, figures in measured.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    (folder / WORST).write_text(str(worst_rank(case.plan, trained.gradients)), encoding="utf-8")


def _real(steps: Callable[[Any], object], plan: TrainingPlan, folder: Path, rank: int) -> dict[str, Measured]:
    import torch.distributed as dist

    from autotune.step.distributed.engines import Engine, engine_of
    from tests.virtual import staged_group
    from tests.virtual.reference import run_on_cpu

    staged_group.register()
    size = plan.launch.processes
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(staged_group.NAME, store=store, rank=rank, world_size=size)
    if engine_of(plan) is Engine.DEEPSPEED:
        import deepspeed
        import deepspeed.comm

        backend: Any = sys.modules["deepspeed.comm.torch"]
        # Compiled in minutes otherwise; without it, DeepSpeed communicates by the group.
        backend.build_shm_op = lambda: None
        # A group that comes back from C++ is another object in Python, which PyTorch does not find; all have all ranks.
        backend.TorchBackend.get_global_rank = _of_all
        deepspeed.init_distributed(dist_backend=staged_group.NAME)
    # Saving gathers by operators that PyTorch has no Python backend for.
    with mock.patch("autotune.step.run.traced_training.save_tensors"):
        found = run_on_cpu(steps)
    dist.destroy_process_group()
    return {name: Measured(found[name].start_bytes, found[name].peak_bytes, found[name].end_bytes) for name in STEPS}


def _of_all(_backend: Any, group: Any = None, group_rank: int | None = None) -> int | None:
    return group_rank


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
