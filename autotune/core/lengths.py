"""The distribution of token lengths in a dataset, and what a maximum length keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LengthDistribution:
    """How many rows a dataset has of each length.

    Attributes:
        counts: from a row's length in tokens to the number of rows of that length. Not empty.
    """

    counts: Mapping[int, int]

    @cached_property
    def _ascending(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self.counts.items()))

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.counts.values())

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in all rows."""
        return sum(length * count for length, count in self.counts.items())

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return self._ascending[-1][0]

    def tokens_kept(self, max_length: int | None) -> int:
        """Return the tokens left when every row is cut to ``max_length`` tokens (None: not cut)."""
        if max_length is None:
            return self.tokens
        return sum(min(length, max_length) * count for length, count in self.counts.items())

    def coverage(self, max_length: int | None) -> float:
        """Return the share of tokens, 0 to 1, left when every row is cut to ``max_length`` tokens."""
        return self.tokens_kept(max_length) / self.tokens

    def rows_over(self, max_length: int) -> int:
        """Return how many rows are longer than ``max_length`` tokens."""
        return sum(count for length, count in self._ascending if length > max_length)

    def shortest_covering(self, coverage: float) -> int:
        """Return the smallest maximum length, in tokens, that keeps at least ``coverage`` (0 to 1) of the tokens."""
        low, high = 1, self.longest
        while low < high:
            middle = (low + high) // 2
            if self.coverage(middle) >= coverage:
                high = middle
            else:
                low = middle + 1
        return low

    def quantile(self, share: float) -> int:
        """Return the length, in tokens, that at least ``share`` (0 to 1) of the rows do not exceed."""
        seen, wanted = 0, share * self.rows
        for length, count in self._ascending:
            seen += count
            if seen >= wanted:
                return length
        return self.longest
