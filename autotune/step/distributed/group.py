"""Joins and leaves the process group of several ranks, and checks that the planned engine runs."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autotune.core.jobs.ranks import rank_variables
from autotune.core.machine import DeviceKind
from autotune.core.plan import TrainingPlan
from autotune.step.distributed.engines import Engine, engine_of
from autotune.techniques.sharding import zero_stage
from autotune.units import plural

# Modules that a DeepSpeed step imports.
_DEEPSPEED_MODULES = ("deepspeed", "deepspeed.comm", "deepspeed.comm.torch", "deepspeed.runtime.engine")


class WrongEngineError(NotImplementedError):
    """A library silently trains with another engine than planned."""


def world_size() -> int:
    """Return the number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def select_device(device: DeviceKind) -> None:
    """Make this rank's GPU the current device; call it before anything measures the device."""
    if device == "cuda" and world_size() > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def prepare_rank(plan: TrainingPlan, device: DeviceKind) -> None:
    """Select this rank's device and import the engine of a plan, before a meter takes its baseline.

    DeepSpeed needs a launcher's variables even for a single process; with several, they are set already.
    """
    if plan.in_group and plan.launch.processes == 1:
        # Port 0: the system chooses one.
        os.environ.update(rank_variables(0, 1, 0))
    select_device(device)
    if plan.args.get("deepspeed"):
        for name in _DEEPSPEED_MODULES:
            importlib.import_module(name)


def join_group(plan: TrainingPlan, device: DeviceKind) -> None:
    """Join the process group for DeepSpeed on a CPU, before the trainer's arguments are built.

    DeepSpeed would compile a shared-memory operator, which takes minutes and does the same as gloo. Without a group,
    transformers assumes a single process when it completes DeepSpeed's configuration.
    """
    if device != "cpu" or not plan.args.get("deepspeed"):
        return
    engine: Any = importlib.import_module("deepspeed")
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    with mock.patch.object(backend, "build_shm_op", return_value=None):
        engine.init_distributed("gloo")


def check_engine(trainer: Any, plan: TrainingPlan) -> None:
    """Check that the engine, the stage and the number of processes are as planned, once the model is wrapped.

    Raises:
        WrongEngineError: the running engine is not the planned one.
    """
    planned, running = planned_engine(plan), running_engine(trainer)
    print(f"Trained by {running}.", flush=True)  # noqa: T201 the job's log
    if planned != running:
        raise WrongEngineError(f"{planned} was planned, and {running} runs")


def planned_engine(plan: TrainingPlan) -> str:
    """Return the planned engine, in the words of :func:`running_engine`."""
    engine, processes = engine_of(plan), plural(plan.launch.processes, "process", "processes")
    if engine is Engine.NONE:
        return processes
    stage = f" {zero_stage(plan)}" if engine is Engine.DEEPSPEED else ""
    groups = _groups_text(plan.parallelism.get("dp_replicate_size", 1), plan.parallelism.get("cp_size", 1))
    return f"{engine}{stage} with {processes}{groups}"


def _groups_text(replicas: object, shards: object) -> str:
    return (f", {replicas} replicas" if replicas != 1 else "") + (f", {shards} to a row" if shards != 1 else "")


def running_engine(trainer: Any) -> str:
    """Return a description of the engine that trains a built trainer's model, derived from the wrapped model."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    world = dist.get_world_size() if dist.is_initialized() else 1
    processes = plural(world, "process", "processes")
    wrapped = trainer.model_wrapped
    if hasattr(wrapped, "zero_optimization_stage"):
        return f"{Engine.DEEPSPEED} {wrapped.zero_optimization_stage()} with {processes}"
    if any(isinstance(module, FSDPModule) for module in wrapped.modules()):
        meshes = [parameter.device_mesh for parameter in wrapped.parameters() if isinstance(parameter, DTensor)]
        groups = _groups_text(
            _mesh_size(meshes[0], "dp_replicate"), _mesh_size(trainer.accelerator.torch_device_mesh, "cp")
        )
        return f"{Engine.FSDP2} with {processes}{groups}"
    # `torch.compile` wraps the DDP module (``Accelerator.prepare_model``).
    if any(isinstance(module, DistributedDataParallel) for module in wrapped.modules()):
        return f"{Engine.DDP} with {processes}"
    return f"no engine with {processes}" if world > 1 else processes


def _mesh_size(mesh: Any, name: str) -> int:
    """Return the size of a device mesh's dimension, 1 if there is none of that name."""
    names = mesh.mesh_dim_names if mesh is not None else None
    return int(mesh[name].size()) if name in (names or ()) else 1


def wait_for_ranks() -> None:
    """Wait until all ranks are done.

    The group stays until the process exits. Destroyed earlier, it could wait forever for its own thread: DDP's reducer
    destroys gloo's group with Python's lock held, and that thread may need the lock to free tensors (PyTorch 2.13,
    ``ProcessGroupGloo::~ProcessGroupGloo`` and ``AsyncWork::~AsyncWork``).
    """
    if dist.is_initialized():
        dist.barrier()
