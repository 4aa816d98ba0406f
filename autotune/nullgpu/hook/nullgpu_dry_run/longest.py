"""Puts the largest rows of a map-style dataset into every batch by replacing the indices of its sampler.

A training meets its worst batch at some time; a dry run has a few steps. The distinct indices of every batch become the
largest rows: gradients and optimizer state are not yet allocated at the first batch, but are at later ones. The
positions and repetitions of an index stay the sampler's, so that a sampler that repeats prompts still does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from torch.utils import data

from .rows import Sizes, UnmeasuredError, measure_rows

# Longest sampler that may be drawn from as a whole.
_MAX_INDICES = 100_000_000
# Samplers that can draw any row, so that none has to be drawn to find the largest.
_OF_ANY_ROW = (data.SequentialSampler, data.RandomSampler, data.DistributedSampler)


class UnorderedError(Exception):
    """The order of a loader's rows cannot be changed; the message gives the reason."""


class LargestFirst:
    """Sampler that replaces the indices of another sampler by those of the largest rows."""

    def __init__(self, sampler: Any, row_sizes: Sizes, batch_size: int) -> None:
        self._sampler = sampler
        self._sizes = row_sizes
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        return replace_indices(map(int, self._sampler), self._sizes.rows, self._batch_size, self._candidates())

    def _candidates(self) -> Sequence[int] | None:
        """Return the indices that the sampler can draw; None if they are known only after drawing."""
        return range(len(self._sizes.rows)) if isinstance(self._sampler, _OF_ANY_ROW) else None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


def replace_indices(
    drawn: Iterable[int], rows: Sequence[int], batch_size: int, candidates: Iterable[int] | None = None
) -> Iterator[int]:
    """Replace the distinct indices of each batch by those of the largest rows.

    If the largest rows all have one size, every second batch ends with the largest of the shorter rows: it makes the
    batch padded, and padding adds an attention mask, which costs memory.

    Args:
        drawn: indices of the rows in the sampler's order.
        rows: the size of each row of the dataset.
        batch_size: rows in a batch.
        candidates: indices to choose from; None: the drawn ones.
    """
    if candidates is None:
        drawn = list(drawn)
        candidates = set(drawn)
    remaining = iter(drawn)
    first = list(islice(remaining, max(1, batch_size)))
    worst = heapq.nsmallest(len(set(first)), candidates, key=lambda index: (-rows[index], index))
    masked = list(worst)
    if len(worst) > 1 and rows[worst[0]] == rows[worst[-1]]:
        shorter = (index for index in candidates if rows[index] < rows[worst[0]])
        masked[-1] = max(shorter, key=lambda index: (rows[index], -index), default=masked[-1])
    places: dict[int, int] = {}
    for index in chain(first, remaining):
        batch, place = divmod(places.setdefault(index, len(places)), len(worst))
        yield (worst, masked)[batch % 2][place]


def put_largest_first(loader: Any) -> Sizes:
    """Make a loader yield its largest rows first; return the sizes of all rows.

    Raises:
        UnorderedError: the order of its rows cannot be changed.
    """
    dataset = loader.dataset
    if isinstance(dataset, data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise UnorderedError("its dataset is iterated, and has no rows by index")
    holder = _innermost(loader)
    sampler = holder.sampler
    if isinstance(sampler, LargestFirst):
        return sampler._sizes
    if not isinstance(sampler, _OF_ANY_ROW) and (not hasattr(sampler, "__len__") or len(sampler) > _MAX_INDICES):
        raise UnorderedError(f"its sampler, {type(sampler).__name__}, has no length, or a huge one")
    if not isinstance(sampler, data.SequentialSampler) and not all(
        hasattr(index, "__index__") for index in islice(sampler, 1)
    ):
        raise UnorderedError(f"its sampler, {type(sampler).__name__}, yields no numbers of rows")
    try:
        # TRL's sampler repeats a prompt for each completion that the trainer generates.
        row_sizes = measure_rows(dataset, prompts_only=getattr(sampler, "mini_repeat_count", 1) > 1)
    except UnmeasuredError as error:
        raise UnorderedError(str(error)) from error
    holder.sampler = LargestFirst(sampler, row_sizes, int(getattr(holder, "batch_size", 1) or 1))
    return row_sizes


def _innermost(loader: Any) -> Any:
    """Return the object whose ``sampler`` chooses the rows: PyTorch's batch sampler, inside accelerate's.

    Raises:
        UnorderedError: another class makes the batches, possibly from the rows' contents.
    """
    holder = loader.batch_sampler
    if holder is None:
        raise UnorderedError("it makes no batches (batch_size=None)")
    while hasattr(holder, "batch_sampler"):
        holder = holder.batch_sampler
    # torchdata has a class of the same name that can be resumed.
    if type(holder).__name__ != "BatchSampler" or not isinstance(holder, data.BatchSampler):
        raise UnorderedError(f"its batches are made by a custom batch sampler, {type(holder).__name__}")
    return holder
