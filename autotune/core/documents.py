"""The lengths of a dataset's documents, and what a maximum length keeps of them, independent of the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.core.lengths import LengthDistribution

Document = tuple[int, ...]
"""A document: the smallest maximum length at which it is kept, then the tokens of each sequence that it sends through
the model, before any cutting.

Examples: a conversation of 700 tokens is ``(1, 700)``: it can be cut anywhere. A preference pair with a prompt of 100
tokens, a chosen answer of 50 and a rejected one of 80 is ``(101, 150, 180)`` for DPO: it is dropped if no token of the
answers would be left. To train a reward model, it is ``(180, 150, 180)``: it is never cut, and dropped where one
sequence is too long.
"""


@dataclass(frozen=True, eq=False)
class Documents:
    """The number of documents of each length in a dataset. A document is one row of the dataset, as the user wrote it.

    Instances compare by identity, so that they are cheap keys for caching what is computed from them.

    Attributes:
        groups: ``(count, *document)`` of each distinct document; not empty. All have equally many sequences.
        order: for each document in the order of the dataset, the index of its group; None where no micro-batch depends
            on the order.
    """

    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] | None = None

    @classmethod
    def of_lengths(cls, lengths: LengthDistribution) -> Documents:
        """Return documents of one sequence each, which can be cut anywhere."""
        return cls(tuple((count, 1, tokens) for tokens, count in lengths.counts.items()))

    @classmethod
    def of_rows(cls, rows: Sequence[Document], *, ordered: bool) -> Documents:
        """Return the documents of a dataset.

        Args:
            rows: the document of each row; not empty.
            ordered: whether their order is kept.
        """
        counts = Counter(rows)
        places = {item: place for place, item in enumerate(sorted(counts))}
        groups = tuple((counts[item], *item) for item in places)
        return cls(groups, tuple(places[item] for item in rows) if ordered else None)

    @property
    def sequences(self) -> int:
        """Sequences that each document sends through the model."""
        return len(self.groups[0]) - 2

    @cached_property
    def rows(self) -> int:
        """Number of documents."""
        return sum(group[0] for group in self.groups)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in the sequences of all documents."""
        return sum(group[0] * sum(group[2:]) for group in self.groups)

    @cached_property
    def first_kept(self) -> int:
        """The smallest maximum length, in tokens, at which any document is kept."""
        return min(group[1] for group in self.groups)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence: the maximum length at which nothing is cut."""
        return max(max(group[1:]) for group in self.groups)

    def kept(self, max_length: int | None, *, dropping: bool = True) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the count of each distinct document that is kept, and the tokens of its sequences once cut.

        Args:
            max_length: tokens to which sequences are cut; None: they are not cut.
            dropping: whether documents that need a larger maximum length are dropped; TRL does not drop when it packs.
        """
        for count, needs, *sequences in self.groups:
            if max_length is None:
                yield count, tuple(sequences)
            elif needs <= max_length or not dropping:
                yield count, tuple(min(tokens, max_length) for tokens in sequences)

    def up_to(self, tokens: int) -> Documents:
        """Return the documents of which no sequence has more tokens before any cutting.

        Raises:
            ValueError: their order is kept.
        """
        if self.order is not None:
            raise ValueError("documents in the order of the dataset cannot be left out by length")
        return Documents(tuple(group for group in self.groups if max(group[2:]) <= tokens))

    def in_order(self, max_length: int | None, *, dropping: bool = True) -> Iterator[Document]:
        """Yield the documents that are kept at a maximum length, uncut, in the order of the dataset.

        Without a known order, equal documents follow one another.
        """
        order = (
            self.order
            if self.order is not None
            else (place for place, group in enumerate(self.groups) for _ in range(group[0]))
        )
        for place in order:
            document = self.groups[place][1:]
            if max_length is None or document[0] <= max_length or not dropping:
                yield document

    def tokens_kept(self, max_length: int | None, *, dropping: bool = True) -> int:
        """Return the tokens that are left at a maximum length."""
        return sum(count * sum(sequences) for count, sequences in self.kept(max_length, dropping=dropping))

    def coverage(self, max_length: int | None, *, dropping: bool = True) -> float:
        """Return the share of tokens, 0 to 1, that is left at a maximum length."""
        return self.tokens_kept(max_length, dropping=dropping) / self.tokens

    def row_coverage(self, max_length: int | None, *, dropping: bool = True) -> float:
        """Return the share of documents, 0 to 1, that is left at a maximum length, whole or cut."""
        return sum(count for count, _ in self.kept(max_length, dropping=dropping)) / self.rows

    def rows_dropped(self, max_length: int) -> int:
        """Return how many documents are dropped whole at a maximum length."""
        return sum(group[0] for group in self.groups if group[1] > max_length)

    def rows_cut(self, max_length: int) -> int:
        """Return how many documents are kept at a maximum length but cut."""
        return sum(group[0] for group in self.groups if group[1] <= max_length < max(group[2:]))

    def shortest_covering(self, coverage: float) -> int:
        """Return the smallest maximum length, in tokens, that keeps a document, and ``coverage``, 0 to 1, of tokens."""
        low, high = self.first_kept, self.longest
        while low < high:
            middle = (low + high) // 2
            if self.coverage(middle) >= coverage:
                high = middle
            else:
                low = middle + 1
        return low
