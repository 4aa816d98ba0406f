"""One rank of several on the virtual device: a process group that sends nothing, and patches of libraries for it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
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

from autotune.virtual.ledger import Ledger
from autotune.virtual.libraries import Patches
from autotune.virtual.records import Category

# What computes with the ranks of a mesh, which are real tensors.
_OF_MESHES = ("__init__", "__getitem__", "_flatten", "_unflatten", "_create_sub_mesh")


@dataclass(frozen=True)
class World:
    """The processes of a training, of which one is traced.

    Attributes:
        size: number of ranks.
        rank: the one that is traced, counted from 0.
    """

    size: int
    rank: int = 0


def as_one_rank(world: World, ledger: Ledger) -> Patches:
    """Make the running trace that of one rank; to be entered before its modes.

    PyTorch allows one process group per process, so traces with ranks cannot be nested.
    """
    yield process_group(world)
    yield from _shards_of_fake_tensors(ledger)
    yield from _replicas_by_hooks(ledger)


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Initialise the default process group with this number of ranks, of which only this one exists.

    Its backend is PyTorch's fake one, and the variables of a launcher are set. Its collectives return at once. What
    they would receive is not there; fake tensors have no values anyway, and the real ones of a data loader keep what
    this rank put in.

    Raises:
        ValueError: this process has a default process group already.
    """
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # As torchrun sets them on a single machine. LOCAL_RANK counts devices, and a trace has one.
    launched = {
        "RANK": world.rank, "LOCAL_RANK": 0, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 0,
    }  # fmt: skip
    with mock.patch.dict(os.environ, {name: str(value) for name, value in launched.items()}):
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
        try:
            with mock.patch.object(dist, "all_gather_object", _same_of_all):
                yield
        finally:
            dist.destroy_process_group()


def _same_of_all(object_list: list[Any], own: Any, group: Any = None) -> None:
    """Give every rank the same object, for ``torch.distributed.all_gather_object``.

    That pickles it into a tensor on the device, and reads what it received, which a trace cannot. TRL so gathers
    prompts and completions as texts, for its logs.
    """
    object_list[:] = [own] * len(object_list)


def _shards_of_fake_tensors(ledger: Ledger) -> Patches:
    """Patch PyTorch and accelerate where sharding, by DTensor, FSDP2 or context parallelism, needs real tensors."""
    outside = _outside_of_modes
    # Computes shapes on fake tensors of a mode of its own.
    shapes = "_propagate_tensor_meta_non_cached"
    yield mock.patch.object(ShardingPropagator, shapes, outside(vars(ShardingPropagator)[shapes]))
    for name in _OF_MESHES:
        if name in vars(DeviceMesh):
            yield mock.patch.object(DeviceMesh, name, outside(vars(DeviceMesh)[name]))
    yield mock.patch.object(DeviceMesh, "mesh", property(outside(DeviceMesh.mesh.fget)))
    made = device_mesh.init_device_mesh
    for module in [found for found in list(sys.modules.values()) if vars(found).get(made.__name__) is made]:
        yield mock.patch.object(module, made.__name__, outside(made))
    yield from _meshes_of(ledger.device_type)


def _outside_of_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _meshes_of(device_type: str) -> Patches:
    """Make accelerate's mesh one of the traced device, which is named ``cuda`` while an ``Accelerator`` is built."""
    module: Any = sys.modules.get("accelerate")
    if module is not None and hasattr(module, "ParallelismConfig"):
        build = _outside_of_modes(module.ParallelismConfig.build_device_mesh)
        yield mock.patch.object(
            module.ParallelismConfig, "build_device_mesh", lambda config, _: build(config, device_type)
        )


def _replicas_by_hooks(ledger: Ledger) -> Patches:
    """Patch ``DistributedDataParallel`` to reduce its buckets by a hook, and not to compare replicas.

    Buckets are built and filled by PyTorch's own reducer. It is not asked to build them anew in the order of the first
    backward pass (``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``), which reads a tensor in C++: the
    sum of the buckets stays the same.
    """
    original = distributed.DistributedDataParallel
    made = original.__init__

    def make(module: Any, *args: Any, **kwargs: Any) -> None:
        made(module, *args, **kwargs)
        module.register_comm_hook(ledger, _reduced)
        module.reducer = _Reducer(module.reducer)

    # Compares values between ranks, in C++.
    yield mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda *args, **kwargs: None)
    yield mock.patch.object(original, "__init__", make)


def _reduced(ledger: Ledger, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    ledger.tag(buffer, Category.GRADIENT)
    dist.all_reduce(buffer, async_op=True)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# PyTorch compares the annotations of a hook with these types, not with their names.
_reduced.__annotations__ = get_type_hints(_reduced)


class _Reducer:
    """The reducer of ``DistributedDataParallel``, which does not rebuild its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
