"""One rank of several on the virtual device: a process group that sends nothing, and patches of libraries for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from autotune.virtual.ledger import Ledger


@dataclass(frozen=True)
class World:
    """The processes of a training, of which one is traced.

    Attributes:
        size: number of ranks.
        rank: the one that is traced, counted from 0.
    """

    size: int
    rank: int = 0


@contextmanager
def as_one_rank(world: World, ledger: Ledger) -> Iterator[None]:
    """Make the running trace that of one rank; to be entered before its modes.

    PyTorch allows one process group per process, so traces with ranks cannot be nested.
    """
    from autotune.virtual.ranks.replicas import replicas_by_hooks
    from autotune.virtual.ranks.shards import shards_of_fake_tensors

    with process_group(world), shards_of_fake_tensors(ledger), replicas_by_hooks(ledger):
        yield


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
    """Take every rank to have the same object, for ``torch.distributed.all_gather_object``.

    That pickles it into a tensor on the device, and reads what it received, which a trace cannot. TRL so gathers
    prompts and completions as texts, for its logs.
    """
    object_list[:] = [own] * len(object_list)
