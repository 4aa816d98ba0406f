"""Sharded tensors and device meshes over fake tensors: DTensor, FSDP2 and context parallelism."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from autotune.virtual.ledger import Ledger

# What computes with the ranks of a mesh, which are real tensors.
_OF_MESHES = ("__init__", "__getitem__", "_flatten", "_unflatten", "_create_sub_mesh")


@contextmanager
def shards_of_fake_tensors(ledger: Ledger) -> Iterator[None]:
    """Patch PyTorch and accelerate where sharding needs real tensors."""
    outside = _outside_of_modes
    with ExitStack() as stack:
        # Computes shapes on fake tensors of a mode of its own.
        shapes = "_propagate_tensor_meta_non_cached"
        stack.enter_context(mock.patch.object(ShardingPropagator, shapes, outside(vars(ShardingPropagator)[shapes])))
        for name in _OF_MESHES:
            if name in vars(DeviceMesh):
                stack.enter_context(mock.patch.object(DeviceMesh, name, outside(vars(DeviceMesh)[name])))
        stack.enter_context(mock.patch.object(DeviceMesh, "mesh", property(outside(DeviceMesh.mesh.fget))))
        made = device_mesh.init_device_mesh
        for module in [found for found in list(sys.modules.values()) if vars(found).get(made.__name__) is made]:
            stack.enter_context(mock.patch.object(module, made.__name__, outside(made)))
        stack.enter_context(_meshes_of(ledger.device_type))
        yield


def _outside_of_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@contextmanager
def _meshes_of(device_type: str) -> Iterator[None]:
    """Make accelerate's mesh one of the traced device, which is named ``cuda`` while an ``Accelerator`` is built."""
    module: Any = sys.modules.get("accelerate")
    if module is None or not hasattr(module, "ParallelismConfig"):
        yield
        return
    build = _outside_of_modes(module.ParallelismConfig.build_device_mesh)
    with mock.patch.object(module.ParallelismConfig, "build_device_mesh", lambda config, _: build(config, device_type)):
        yield
