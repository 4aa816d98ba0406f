"""The tensors of an operator in a device's cache: those that were read or written last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotune.inspection.gpus import gpus
from autotune.virtual import trace
from autotune.virtual.cost.roofline import Kind
from autotune.virtual.recording.ledger import _MAX_BYTES, Recency

COUNT = 1000
SIZE = 4 * COUNT
Run = Callable[[torch.Tensor, torch.Tensor], object]


def reused(run: Run) -> tuple[tuple[int, int], ...]:
    """Return the blocks that a cache may hold for the last operator of a function of two tensors."""

    def built(device: torch.device) -> None:
        run(torch.empty(COUNT, device=device), torch.empty(COUNT, device=device))

    return [each.work for each in trace(built).operators if each.work.kind is Kind.ELEMENTWISE][-1].reused


def _beside(x: torch.Tensor, y: torch.Tensor) -> object:
    first, others = x * 2, [y * 2, y * 3]
    return first.exp(), others


def _in_place(x: torch.Tensor, y: torch.Tensor) -> object:
    first = x * 2
    return first, y.add_(first)


def _in_a_freed_block(x: torch.Tensor, y: torch.Tensor) -> object:
    first = x * 2
    del first
    return y * 2


@pytest.mark.parametrize(
    ("run", "blocks"),
    [
        (lambda x, _: x * 2, []),
        (lambda x, _: (x * 2).exp(), [(SIZE, 0)]),
        # What was read or written since: y, and two results.
        (_beside, [(SIZE, 3 * SIZE)]),
        (lambda x, _: (x * 2)[: COUNT // 2].exp(), [(SIZE // 2, 0)]),
        (lambda x, y: (x.add_(1), x.mul_(y)), [(SIZE, 0), (SIZE, 0)]),
        (_in_place, [(SIZE, 0)]),
        (_in_a_freed_block, [(SIZE, 0)]),
        (lambda x, _: (x * 2).index_select(0, torch.arange(2, device=x.device)), []),
    ],
    ids=["nothing", "result", "older result", "part", "in place", "in place, elsewhere", "freed block", "gathered"],
)
def test_a_cache_may_hold_what_was_touched_last(run: Run, blocks: list[tuple[int, int]]) -> None:
    assert list(reused(run)) == blocks


def test_the_bytes_since_a_block_was_touched_count_each_other_block_once() -> None:
    recency = Recency()
    for storage in (1, 2, 3):
        recency.allocate(storage, 10 * storage)
    recency.touch([1, 2, 3, 2, 3])
    assert recency.since([1, 2, 3]) == (50, 30, 0)


def test_a_freed_block_is_taken_once_and_by_a_tensor_of_its_size() -> None:
    recency = Recency()
    recency.allocate(1, 10)
    recency.touch([1])
    recency.free(1)
    for storage, size in ((2, 11), (3, 10), (4, 10)):
        recency.allocate(storage, size)
    assert recency.since([2, 3, 4]) == (None, 0, None)
    recency.free(3)
    recency.allocate(5, 10)
    assert recency.since([5]) == (0,)


def test_blocks_are_forgotten_that_no_cache_can_hold() -> None:
    recency = Recency()
    for storage, size in ((1, 10), (2, _MAX_BYTES - 9)):
        recency.allocate(storage, size)
        recency.touch([storage])
    assert recency.since([1, 2]) == (None, 0)
    assert max(gpu.speeds.achieved.cache_bytes for gpu in gpus() if gpu.speeds) <= _MAX_BYTES
