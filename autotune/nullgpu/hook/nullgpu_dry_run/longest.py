"""Puts the largest rows of a map-style dataset into every batch by replacing the indices of its sampler.

A training meets its worst batch at some time; a dry run has a few steps. The distinct indices of a first batch become
the largest rows, and those of each further batch the same again: gradients and optimizer state, which are not there at
the first batch, are there at a later one. How often an index comes, and in which place, stays what the sampler does, so
that one which repeats prompts repeats these.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from torch.utils import data

from .rows import Sizes, UnmeasuredError, sizes

# Sampling loops that never end have no length; those with one are read as a whole.
_MOST_INDICES = 100_000_000


class UnorderedError(Exception):
    """The rows of a loader stay in the order that they have; the message gives the reason."""


class LargestFirst:
    """Wraps a sampler and replaces its indices by those of the largest rows."""

    def __init__(self, sampler: Any, found: Sizes, batch_size: int) -> None:
        self._sampler = sampler
        self._sizes = found
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        return relabelled(map(int, self._sampler), self._sizes.rows, self._batch_size, self._choice())

    def _choice(self) -> Sequence[int] | None:
        """Return the rows that the sampler may draw at some time, or None if they are known only after drawing."""
        drawing_any = (data.SequentialSampler, data.RandomSampler, data.DistributedSampler)
        return range(len(self._sizes.rows)) if isinstance(self._sampler, drawing_any) else None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


def relabelled(
    drawn: Iterable[int], rows: Sequence[int], batch_size: int, choice: Iterable[int] | None = None
) -> Iterator[int]:
    """Yield the indices that were drawn with the largest rows in the place of each batch's distinct ones.

    Where the largest rows all have one size, the last of every second batch is the largest of the shorter rows: beside
    it, the others are padded, and padding brings a mask, which costs memory.

    Args:
        rows: the size of each row of the dataset.
        batch_size: rows in a batch.
        choice: the rows to choose from; None: those that are drawn.
    """
    if choice is None:
        drawn = list(drawn)
        choice = set(drawn)
    rest = iter(drawn)
    first = list(islice(rest, max(1, batch_size)))
    worst = heapq.nsmallest(len(set(first)), choice, key=lambda index: (-rows[index], index))
    masked = list(worst)
    if len(worst) > 1 and rows[worst[0]] == rows[worst[-1]]:
        shorter = (index for index in choice if rows[index] < rows[worst[0]])
        masked[-1] = max(shorter, key=lambda index: (rows[index], -index), default=masked[-1])
    places: dict[int, int] = {}
    for index in chain(first, rest):
        batch, place = divmod(places.setdefault(index, len(places)), len(worst))
        yield (worst, masked)[batch % 2][place]


def order(loader: Any) -> Sizes:
    """Make a loader yield its largest rows first, and return the sizes of all.

    Raises:
        UnorderedError: it has to stay as it is.
    """
    dataset = loader.dataset
    if isinstance(dataset, data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise UnorderedError("its dataset is iterated, and has no rows by index")
    holder = _innermost(loader)
    sampler = holder.sampler
    if isinstance(sampler, LargestFirst):
        return sampler._sizes
    if not hasattr(sampler, "__len__") or len(sampler) > _MOST_INDICES:
        raise UnorderedError(f"its sampler, {type(sampler).__name__}, has no length")
    if not isinstance(sampler, data.SequentialSampler) and not all(
        hasattr(index, "__index__") for index in islice(sampler, 1)
    ):
        raise UnorderedError(f"its sampler, {type(sampler).__name__}, yields no numbers of rows")
    try:
        # TRL's sampler repeats a prompt for each of the completions that a trainer generates to it.
        found = sizes(dataset, of_prompts=getattr(sampler, "mini_repeat_count", 1) > 1)
    except UnmeasuredError as error:
        raise UnorderedError(str(error)) from error
    holder.sampler = LargestFirst(sampler, found, int(getattr(holder, "batch_size", 1) or 1))
    return found


def _innermost(loader: Any) -> Any:
    """Return the object whose ``sampler`` chooses the rows: PyTorch's batch sampler, inside accelerate's.

    Raises:
        UnorderedError: batches are made by another class, which may look at the rows.
    """
    holder = loader.batch_sampler
    if holder is None:
        raise UnorderedError("it makes no batches (batch_size=None)")
    while hasattr(holder, "batch_sampler"):
        holder = holder.batch_sampler
    if type(holder) is not data.BatchSampler:
        raise UnorderedError(f"its batches are made by a batch sampler of its own, {type(holder).__name__}")
    return holder
