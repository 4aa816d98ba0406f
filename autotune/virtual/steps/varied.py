"""Inserts scaled copies of a traced optimizer step, on shorter micro-batches, before it; for the allocator's replay.

Segments that the caching allocator reserved for one length do not always fit the next, so batches of many lengths
reserve more memory than the longest batch alone. The shapes of operators' results determine which sizes scale with the
length, so no other length has to be traced.

Example: a step holds the gradient of the first micro-batch while the second runs. If the first was shorter, that
gradient may occupy part of the segment that the second one's logits need.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from autotune.virtual.recording.records import Category, Phase, Place, Trace
from autotune.virtual.steps.phases import micro_batches
from autotune.virtual.steps.steady import Copy, Size

SHARES = (1 / 2, 3 / 4, 7 / 8, 15 / 16)
"""Lengths of preceding micro-batches, as shares of the longest. Each halves the distance to it: segments reserved for a
shorter length are too small for the next, so ascending order reserves the most. Four steps reserve about as much as a
hundred of random lengths (benchmarks/published/published.md)."""

# Categories of storages whose size does not depend on the length.
_MODEL_CATEGORIES = frozenset({Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE})
_ELEMENT_BYTES = (1, 2, 4, 8)


@dataclass(frozen=True)
class MicroBatch:
    """The shape of a traced micro-batch, which determines which tensor sizes scale with its length.

    Attributes:
        rows: rows of the token tensor.
        tokens: tokens per row, padding included.
    """

    rows: int
    tokens: int

    def scaled(self, shape: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Return the shape that a tensor would have with ``tokens`` tokens per row."""
        sizes = list(shape)
        # A loss drops one token of each row.
        for row in (self.tokens, self.tokens - 1):
            shorter = max(1, tokens - (self.tokens - row))
            for times in (1, self.rows):
                whole = times * row
                if whole > 1 and whole in sizes:
                    sizes[sizes.index(whole)] = times * shorter
                    # Attention scores and masks have the length in two dimensions. For hidden states, an equal last
                    # dimension is a coincidence.
                    if sizes[-1] == whole and (len(sizes) > 3 or shape[0] not in (self.rows, whole)):
                        sizes[-1] = times * shorter
                    return tuple(sizes)
        return tuple(sizes)


def steps_before(tokens: int, in_step: int) -> list[tuple[int, ...]]:
    """Return the tokens per row of the micro-batches in the inserted steps, for a traced step with ``tokens``.

    In steps of two micro-batches, the first and the second have ``tokens`` in turn. Four candidates were trained on
    null GPUs on 160 or 200 micro-batches in random order. For two, the inserted steps reserve the measured bytes within
    0.1 % (8 and 9 % more than the longest alone); for the other two, 3 and 25 % more than measured.

    Args:
        in_step: micro-batches of a step, 1 or 2.
    """
    lengths = [round(share * tokens) for share in SHARES]
    if in_step == 1:
        return [(length,) for length in lengths]
    return [step for length in lengths for step in ((tokens, length), (length, tokens))]


def varied(traced: Trace, step: Phase, batch: MicroBatch, before: Iterable[Sequence[int]]) -> Trace:
    """Return the trace's device events, with copies of a step at other lengths inserted before the step.

    Args:
        step: a steady step: live storages have the same sizes before and after it.
        batch: the shape of its micro-batches.
        before: tokens per row in each micro-batch of each inserted step, in order.
    """
    # Events before the first micro-batch scale with it, and those of the update with the last one.
    ends = [run.end_event for run in micro_batches(traced, step)][:-1]
    earlier = {event.storage for event in traced.events[: step.first_event]}
    successors = _successors(traced, step, earlier)

    def sizes(tokens: Sequence[int]) -> Size:
        def size(index: int) -> int:
            event = traced.events[index]
            length = tokens[bisect_right(ends, index)]
            fixed = event.storage in earlier or traced.categories.get(event.storage) in _MODEL_CATEGORIES
            if fixed or length == batch.tokens:
                return event.change_bytes
            return _scaled_bytes(event.change_bytes, traced.operators[event.operator].shapes, batch, length)

        return size

    copy = Copy(traced)
    copy.take(((0, 0), step.begin))
    for tokens in (*before, (batch.tokens,) * (len(ends) + 1)):
        copy.replace_freed(successors)
        copy.take((step.begin, step.end), size=sizes(tokens))
    copy.take((step.end, (len(traced.events), len(traced.operators))))
    composed = copy.finished()
    events = (event for event in composed.events if event.place is Place.DEVICE)
    return replace(composed, events=tuple(events), phases=())


def _successors(traced: Trace, step: Phase, earlier: Collection[int]) -> dict[int, int]:
    """Map each earlier storage that a step frees to a storage of equal size that the step allocates and keeps live."""
    changes: dict[int, int] = defaultdict(int)
    for event in traced.events[step.first_event : step.end_event]:
        if event.place is Place.DEVICE:
            changes[event.storage] += event.change_bytes
    allocated: dict[int, list[int]] = defaultdict(list)
    for storage, size in changes.items():
        if storage not in earlier and size > 0:
            allocated[size].append(storage)
    freed = [(storage, -size) for storage, size in changes.items() if storage in earlier and size < 0]
    return {storage: allocated[size].pop(0) for storage, size in freed if allocated.get(size)}


@lru_cache(maxsize=1 << 14)
def _scaled_bytes(size: int, every: tuple[tuple[int, ...], ...], batch: MicroBatch, tokens: int) -> int:
    """Return the scaled size of a storage that an operator allocated, given the shapes of its inputs and results.

    A size that matches no shape, such as a workspace, scales with the last shape.
    """
    shapes = [shape for shape in every if prod(shape)]
    made = (shape for shape in reversed(shapes) if size in [bytes_ * prod(shape) for bytes_ in _ELEMENT_BYTES])
    shape = next(made, shapes[-1] if shapes else ())
    return max(1, size * prod(batch.scaled(shape, tokens)) // prod(shape))
