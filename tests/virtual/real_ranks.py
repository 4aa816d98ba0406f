"""Trains as one of several real ranks on the CPU, connected by gloo: what traces with ranks are held against."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.core.codec import decode, encode
from autotune.core.plan import TrainingPlan

_STORE = "store"


@dataclass(frozen=True)
class Case:
    """A plan, the configuration of its model, and the rows of its micro-batches."""

    plan: TrainingPlan
    architecture: str
    config: Mapping[str, Any]
    worst: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Measured:
    """The bytes of a rank's optimizer step: live storages before it, the most of them in it, and after it."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int


def on_real_ranks(case: Case, folder: Path) -> list[dict[str, Measured]]:
    """Return what each rank measured, by the name of the step, in the order of ranks.

    Raises:
        AssertionError: a rank failed; the message is what it wrote.
    """
    (folder / "case.json").write_text(json.dumps(encode(case)), encoding="utf-8")
    ranks = range(case.plan.launch.processes)
    environment = {**os.environ, "WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks)),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    started = []
    for rank in ranks:
        with (folder / f"log-{rank}.txt").open("wb") as log:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "tests.virtual.real_ranks", str(folder)]
            started.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    try:
        for rank, process in enumerate(started):
            status = process.wait(timeout=280)
            assert status == 0, (folder / f"log-{rank}.txt").read_text(encoding="utf-8")[-4000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
    replies = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in ranks]
    return [{name: decode(Measured, figures) for name, figures in reply.items()} for reply in replies]


def main(folder: Path) -> None:
    """Train as the rank that the environment names, and write what was measured."""
    import torch
    import torch.distributed as dist

    from autotune.step.distributed.engines import Engine, engine_of
    from autotune.step.run.traced_training import TracedRows, traced_training
    from tests.small import small_tokenizer
    from tests.virtual import staged_group
    from tests.virtual.live_storages import steps_on_cpu
    from tests.virtual.models import config_of

    torch.set_num_threads(1)
    case = decode(Case, json.loads((folder / "case.json").read_text(encoding="utf-8")))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / _STORE), size)
    staged_group.register()
    dist.init_process_group(os.environ.get("VRB", staged_group.NAME), store=store, rank=rank, world_size=size)
    if engine_of(case.plan) is Engine.DEEPSPEED:
        import deepspeed
        import deepspeed.comm

        # Compiled in minutes otherwise; without it, DeepSpeed communicates by gloo.
        backend: Any = sys.modules["deepspeed.comm.torch"]
        backend.build_shm_op = lambda: None
        # A group that comes back from C++ is another object in Python, which PyTorch does not find; all are of all ranks.
        backend.TorchBackend.get_global_rank = lambda self, group=None, group_rank=None: group_rank
        deepspeed.init_distributed(dist_backend=staged_group.NAME)
    # TRL's tile of 32768 words would be most of a small model's peak and hide every error in the rest.
    import trl.trainer.utils

    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = 128
    model_config = config_of(case.architecture, **case.config)
    steps = traced_training(case.plan, model_config, small_tokenizer(), TracedRows(case.worst))
    gc.collect()
    # Saving gathers by operators that PyTorch has no Python backend for.
    with mock.patch("autotune.step.run.traced_training.save_tensors"):
        found = {name: encode(measured) for name, measured in steps_on_cpu(steps).items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
