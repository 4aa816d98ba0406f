"""Traces one rank of several: a fake process group, and patches of libraries that need real tensors or peers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_type_hints
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import _disable_current_modes

from autotune.core.jobs.ranks import rank_variables
from autotune.virtual.patches.libraries import Patches
from autotune.virtual.recording.ledger import Ledger
from autotune.virtual.recording.records import Category

# Methods that compute with the ranks of a mesh, which are real tensors.
_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten", "_create_sub_mesh")


@dataclass(frozen=True)
class World:
    """The processes of a training, of which one is traced.

    Attributes:
        size: number of ranks.
        rank: the traced rank, counted from 0.
    """

    size: int
    rank: int = 0


def as_one_rank(world: World, ledger: Ledger) -> Patches:
    """Patch PyTorch and libraries so that a trace is that of one rank; enter before the trace's dispatch modes.

    PyTorch has one default process group per process, so traces with ranks cannot be nested.
    """
    yield process_group(world)
    yield from _shards_of_fake_tensors(ledger)
    yield from _replicas_by_hooks(ledger)


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Initialise a default process group of ``world.size`` ranks, of which only this one exists.

    It uses PyTorch's fake backend, and sets a launcher's environment variables. Collectives return at once and receive
    nothing: fake tensors have no values, and the real tensors of a data loader keep this rank's values.

    Raises:
        ValueError: this process has a default process group already.
    """
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # As torchrun sets them on one machine, except LOCAL_RANK: it selects the device, and a trace has one.
    launched = {**rank_variables(world.rank, world.size, port=0), "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, launched):
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
        try:
            with mock.patch.object(dist, "all_gather_object", _gather_own_object):
                yield
        finally:
            dist.destroy_process_group()


def _gather_own_object(object_list: list[Any], own: Any, group: Any = None) -> None:
    """Replaces ``torch.distributed.all_gather_object``: every rank contributes this rank's object.

    The original pickles the object into a device tensor and reads the received values, which a trace does not have. TRL
    uses it to gather prompts and completions as text for its logs.
    """
    object_list[:] = [own] * len(object_list)


def _shards_of_fake_tensors(ledger: Ledger) -> Patches:
    """Patch PyTorch and accelerate where DTensor, FSDP2 or context parallelism computes with real tensors."""
    outside = _disable_current_modes()
    # It computes shapes under its own fake tensor mode.
    shapes = "_propagate_tensor_meta_non_cached"
    yield mock.patch.object(ShardingPropagator, shapes, outside(vars(ShardingPropagator)[shapes]))
    for name in _MESH_METHODS:
        if name in vars(DeviceMesh):
            yield mock.patch.object(DeviceMesh, name, outside(vars(DeviceMesh)[name]))
    yield mock.patch.object(DeviceMesh, "mesh", property(outside(DeviceMesh.mesh.fget)))
    made = device_mesh.init_device_mesh
    for module in [found for found in list(sys.modules.values()) if vars(found).get(made.__name__) is made]:
        yield mock.patch.object(module, made.__name__, outside(made))
    yield from _meshes_of(ledger.device_type)


def _meshes_of(device_type: str) -> Patches:
    """Patch accelerate to build its mesh for the traced device; ``Accelerator.__init__`` passes ``cuda`` in a trace."""
    module: Any = sys.modules.get("accelerate")
    if module is not None:
        build = _disable_current_modes()(module.ParallelismConfig.build_device_mesh)
        yield mock.patch.object(
            module.ParallelismConfig, "build_device_mesh", lambda config, _: build(config, device_type)
        )


def _replicas_by_hooks(ledger: Ledger) -> Patches:
    """Patch ``DistributedDataParallel`` to reduce its buckets in a communication hook, and not to compare replicas.

    PyTorch's own reducer builds and fills the buckets. It does not rebuild them in the order of the first backward pass
    (``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``), since that reads a tensor in C++; the total size
    of the buckets is the same.
    """
    original = distributed.DistributedDataParallel
    made = original.__init__

    def make(module: Any, *args: Any, **kwargs: Any) -> None:
        made(module, *args, **kwargs)
        module.register_comm_hook(ledger, _reduced)
        module.reducer = _Reducer(module.reducer)

    # It compares values between ranks, in C++.
    yield mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda *args, **kwargs: None)
    yield mock.patch.object(original, "__init__", make)


def _reduced(ledger: Ledger, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    ledger.tag(buffer, Category.GRADIENT)
    dist.all_reduce(buffer, async_op=True)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# PyTorch checks the annotations of a hook, which have to be types, not strings.
_reduced.__annotations__ = get_type_hints(_reduced)


class _Reducer:
    """Wraps the reducer of ``DistributedDataParallel``, and never rebuilds its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
