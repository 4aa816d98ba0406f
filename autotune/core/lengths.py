"""The distribution of token lengths in a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LengthDistribution:
    """How many rows a dataset has of each length.

    Attributes:
        counts: from a row's length in tokens to the number of rows of that length, by ascending length, so that a
            document does not depend on the order of the rows. Not empty.
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
        """Return the rows that have at most so many tokens."""
        return LengthDistribution({length: count for length, count in self.counts.items() if length <= tokens})

    def cut_to(self, tokens: int) -> LengthDistribution:
        """Return the rows as they are after longer ones were cut to so many tokens."""
        cut = Counter[int]()
        for length, count in self.counts.items():
            cut[min(length, tokens)] += count
        return LengthDistribution(dict(cut))

    def quantile(self, share: float) -> int:
        """Return the length, in tokens, that at least ``share`` (0 to 1) of the rows do not exceed."""
        seen, wanted = 0, share * self.rows
        for length, count in self.counts.items():
            seen += count
            if seen >= wanted:
                return length
        return self.longest
