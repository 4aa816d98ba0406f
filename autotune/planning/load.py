"""What a candidate makes of a dataset: the shape of its largest and of its typical micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from autotune.core.batch_geometry import has_padding, rounded_up, worst_micro_batches
from autotune.core.candidate import Candidate
from autotune.core.lengths import LengthDistribution
from autotune.core.setting import Setting
from autotune.planning.extrapolation.shape import Kind, Shape
from autotune.techniques.base import ON
from autotune.techniques.packing import NONE, SEPARATING

SIZES = frozenset({"max_length", "per_device_train_batch_size", "pad_to_multiple_of", "packing", "padding_free"})
"""Knobs that choose the shape of micro-batches, and nothing else of a step."""


@dataclass(frozen=True)
class Load:
    """The micro-batches of a candidate.

    Attributes:
        worst: the largest.
        typical: of mean size.
        tokens: dataset tokens of the typical one, padding excluded.
        micro_batches: in an optimizer step.
    """

    kind: Kind
    worst: Shape
    typical: Shape
    tokens: float
    micro_batches: int


def load_of(candidate: Candidate, setting: Setting) -> Load:
    """Return the micro-batches that a candidate has."""
    rows, length = int(candidate["per_device_train_batch_size"]), int(candidate["max_length"])
    micro_batches = setting.rows_per_process // rows
    lengths = setting.workload.dataset.lengths
    multiple = candidate["pad_to_multiple_of"]
    packing, free = str(candidate["packing"]), candidate["padding_free"] == ON
    found = _shapes(_Lengths(lengths), rows, length, multiple if isinstance(multiple, int) else 1, packing, free)
    return Load(*found, micro_batches)


class _Lengths:
    """A length distribution that is known by itself, since counting it anew for each candidate takes long."""

    def __init__(self, lengths: LengthDistribution) -> None:
        self.lengths = lengths

    def __hash__(self) -> int:
        return id(self.lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Lengths) and other.lengths is self.lengths


@cache
def _shapes(
    known: _Lengths, rows: int, length: int, multiple: int, packing: str, free: bool
) -> tuple[Kind, Shape, Shape, float]:
    counts = _cut(known.lengths, length)
    total = sum(counts.values())
    mean = sum(tokens * count for tokens, count in counts.items()) / total
    if packing in SEPARATING:
        filled = length * _fill(counts, length)
        return Kind.FLAT, Shape(1, rows * length), Shape(1, rows * filled), rows * filled
    if packing != NONE:
        return Kind.EQUAL, Shape(rows, length), Shape(rows, length), float(rows * length)
    if free:
        return Kind.FLAT, Shape(1, _longest_together(counts, rows)), Shape(1, rows * mean), rows * mean
    longest_first = _longest_first(counts, rows)
    worst = worst_micro_batches(longest_first, rows, padded=True, multiple=multiple)[0]
    longest = rounded_up(longest_first[0], multiple)
    typical = sum(share * rounded_up(tokens, multiple) for tokens, share in _longest_of(counts, rows))
    kind = Kind.PADDED if has_padding((longest_first[position] for position in worst), multiple) else Kind.EQUAL
    return kind, Shape(rows, longest), Shape(rows, typical), rows * mean


def _cut(lengths: LengthDistribution, length: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for tokens, count in lengths.counts.items():
        kept = min(tokens, length)
        counts[kept] = counts.get(kept, 0) + count
    return counts


def _longest_of(counts: Mapping[int, int], rows: int) -> list[tuple[int, float]]:
    """Return the probability of each length to be the longest of so many random rows."""
    total, seen, below, found = sum(counts.values()), 0, 0.0, []
    for tokens in sorted(counts):
        seen += counts[tokens]
        share = (seen / total) ** rows
        found.append((tokens, share - below))
        below = share
    return found


def _longest_first(counts: Mapping[int, int], rows: int) -> list[int]:
    """Return the tokens of the so many longest rows in descending order, and those of the longest row that is shorter
    than all of them where there is one."""
    found: list[int] = []
    for tokens in sorted(counts, reverse=True):
        if len(found) >= rows:
            return [*found, tokens]
        found += [tokens] * min(counts[tokens], rows - len(found))
    return found


def _longest_together(counts: Mapping[int, int], rows: int) -> int:
    """Return the tokens of the largest micro-batch of rows laid end to end."""
    longest_first = _longest_first(counts, rows)
    return sum(longest_first[position] for position in worst_micro_batches(longest_first, rows, padded=False)[0])


def _fill(counts: Mapping[int, int], length: int) -> float:
    """Return the share of packed rows that documents fill, by best fit, the longest first, as TRL packs them.

    Equal documents are packed together, so that rows are counted by the space that is left in them.
    """
    open_rows: dict[int, int] = {}
    rows = 0
    for tokens in sorted(counts, reverse=True):
        left = counts[tokens]
        while left:
            space = min((space for space in open_rows if space >= tokens), default=None)
            if space is None:
                per_row = length // tokens
                whole, rest = divmod(left, per_row)
                rows += whole + (rest > 0)
                open_rows[length - per_row * tokens] = open_rows.get(length - per_row * tokens, 0) + whole
                if rest:
                    open_rows[length - rest * tokens] = open_rows.get(length - rest * tokens, 0) + 1
                left = 0
            else:
                taken = min(left, open_rows[space])
                left, open_rows[space] = left - taken, open_rows[space] - taken
                open_rows[space - tokens] = open_rows.get(space - tokens, 0) + taken
            open_rows = {room: count for room, count in open_rows.items() if room and count}
    return sum(tokens * count for tokens, count in counts.items()) / (rows * length)
