"""One rank of several on the virtual device: a process group that sends nothing, and patches of libraries for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.virtual.dispatch import VirtualMode
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
def as_one_rank(world: World, ledger: Ledger, mode: VirtualMode) -> Iterator[None]:
    """Make the running trace that of one rank; to be entered before its modes.

    PyTorch allows one process group per process, so traces with ranks cannot be nested.
    """
    from autotune.virtual.ranks.collectives import Collectives
    from autotune.virtual.ranks.groups import process_group
    from autotune.virtual.ranks.replicas import replicas_by_hooks
    from autotune.virtual.ranks.shards import shards_of_fake_tensors

    mode.sharing = Collectives()
    with ExitStack() as stack:
        stack.enter_context(process_group(world))
        stack.enter_context(shards_of_fake_tensors(ledger))
        stack.enter_context(replicas_by_hooks(ledger))
        yield
