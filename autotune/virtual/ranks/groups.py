"""A process group of ranks that are not there: PyTorch's fake backend, and the variables that a launcher sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist

if TYPE_CHECKING:
    from autotune.virtual.ranks import World


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Initialise the default process group with this number of ranks, of which only this one exists.

    Its collectives return at once. What they would receive is not there; fake tensors have no values anyway, and the
    real ones of a data loader keep what this rank put in.

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
