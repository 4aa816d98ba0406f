"""A distribution of whole numbers over rows, such as their lengths in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class LengthDistribution:
    """The number of rows of each length.

    Attributes:
        counts: number of rows by length in tokens, ascending, so that equal distributions have equal documents; not
            empty.
    """

    counts: Mapping[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", dict(sorted(self.counts.items())))

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.counts.values())

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all rows."""
        return sum(length * count for length, count in self.counts.items())

    @cached_property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.counts)

    def up_to(self, tokens: int) -> LengthDistribution:
        """Return the distribution of the rows that have at most ``tokens`` tokens."""
        return LengthDistribution({length: count for length, count in self.counts.items() if length <= tokens})

    def cut_to(self, tokens: int) -> LengthDistribution:
        """Return the distribution after longer rows are cut to ``tokens`` tokens."""
        cut = Counter[int]()
        for length, count in self.counts.items():
            cut[min(length, tokens)] += count
        return LengthDistribution(dict(cut))

    def quantile(self, share: float) -> int:
        """Return the length, in tokens, that at least ``share`` (0 to 1) of the rows do not exceed."""
        wanted = share * self.rows
        rows = zip(self.counts, accumulate(self.counts.values()), strict=True)
        return next(length for length, seen in rows if seen >= wanted)
