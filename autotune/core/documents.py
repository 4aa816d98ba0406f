"""The lengths of a dataset's documents, and what a maximum length keeps of them, independent of the trainer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from autotune.core.lengths import LengthDistribution
from autotune.core.table import Table

if TYPE_CHECKING:
    from autotune.core.table import Numbers

_REMEMBERED = 16
"""Figures for all lengths that are remembered, by dataset; a training has rows to train and to evaluate on."""
Document = tuple[Any, ...]
"""A document: the smallest maximum length at which it is kept, then the tokens of each sequence that it sends through
the model, before any cutting. They are numbers; or arrays with a number for each row, where all rows are meant at once.

Examples: a conversation of 700 tokens is ``(1, 700)``: it can be cut anywhere. A preference pair with a prompt of 100
tokens, a chosen answer of 50 and a rejected one of 80 is ``(101, 150, 180)`` for DPO: it is dropped if no token of the
answers would be left. To train a reward model, it is ``(180, 150, 180)``: it is never cut, and dropped where one
sequence is too long.
"""


@dataclass(frozen=True, eq=False)
class Documents:
    """The number of documents of each length in a dataset. A document is one row of it; KTO takes a pair for two.

    Instances compare by identity, so that they are cheap keys for caching what is computed from them. Millions of
    documents may all be distinct, so that there is no Python object for each.

    Attributes:
        groups: a row of the table for each distinct document, with its count and the document; at least one.
        order: for each document in the order of the dataset, the index of its group; None where no micro-batch depends
            on the order.
        trained: for each group, the tokens that the loss counts in the sequences of one of its documents; None where
            that is all tokens, or not known.
    """

    groups: Table
    order: Table | None = None
    trained: Table | None = None

    @classmethod
    def of_groups(cls, groups: Iterable[tuple[int, ...]]) -> Documents:
        """Return documents of which the count and the document is given, ``(count, *document)``."""
        return cls(Table(list(zip(*groups, strict=True))))

    @classmethod
    def of_lengths(cls, lengths: LengthDistribution) -> Documents:
        """Return documents of one sequence each, which can be cut anywhere."""
        return cls.of_groups((count, 1, tokens) for tokens, count in lengths.counts.items())

    @classmethod
    def of_rows(cls, rows: Any, *, ordered: bool, trained: Any = None) -> Documents:
        """Return the documents of a dataset.

        Args:
            rows: the document of each row, an array of shape (rows, numbers of a document); not empty.
            ordered: whether their order is kept.
            trained: the tokens of each row that the loss counts, an array of shape (rows,); None: not known.
        """
        import numpy as np

        rows = np.asarray(rows) if trained is None else np.column_stack([rows, trained])
        ascending = np.lexsort(rows.T[::-1])
        differs = np.zeros(len(rows), dtype=bool)
        for column in rows.T:
            differs[1:] |= np.diff(column[ascending]) != 0
        starts = np.flatnonzero(np.append(~differs[:1], differs[1:]))
        distinct = rows[ascending[starts]]
        columns = [np.diff(starts, append=len(rows)), *distinct.T]
        counted = None if trained is None else Table([columns.pop()])
        if not ordered:
            return cls(Table(columns), trained=counted)
        places = np.empty(len(rows), dtype=np.int32)
        places[ascending] = np.cumsum(differs, dtype=np.int32)
        return cls(Table(columns), Table([places]), counted)

    @property
    def sequences(self) -> int:
        """Sequences that each document sends through the model."""
        return self.groups.width - 2

    @cached_property
    def rows(self) -> int:
        """Number of documents."""
        return self.rows_kept(None)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in the sequences of all documents."""
        return self.tokens_kept(None)

    @cached_property
    def first_kept(self) -> int:
        """The smallest maximum length, in tokens, at which any document is kept."""
        return min(int(part[:, 1].min()) for part in self.groups.parts())

    @cached_property
    def last_kept(self) -> int:
        """The smallest maximum length, in tokens, at which every document is kept."""
        return max(int(part[:, 1].max()) for part in self.groups.parts())

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence: the maximum length at which nothing is cut."""
        return max(int(part[:, 1:].max()) for part in self.groups.parts())

    def kept(self, max_length: int | None, *, dropping: bool = True) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield the counts of distinct documents that are kept, and the tokens of their sequences once cut.

        Their shapes are (documents,) and (documents, sequences).

        Args:
            max_length: tokens to which sequences are cut; None: they are not cut.
            dropping: whether documents that need a larger maximum length are dropped; TRL does not drop when it packs.
        """
        for part in self.groups.parts():
            if max_length is None:
                yield part[:, 0], part[:, 2:]
            else:
                left = part[part[:, 1] <= max_length] if dropping else part
                yield left[:, 0], left[:, 2:].clip(max=max_length)

    @cached_property
    def widths(self) -> Mapping[int, int]:
        """How many documents there are by the tokens of their longest sequence before any cutting, ascending."""
        return self.by_width()

    def by_width(self, max_length: int | None = None, *, dropping: bool = True) -> dict[int, int]:
        """Return how many documents are kept at a maximum length by the tokens of their longest sequence, ascending."""
        import numpy as np

        found = np.zeros(self.longest + 1, dtype=np.int64)
        for counts, sequences in self.kept(max_length, dropping=dropping):
            np.add.at(found, sequences.max(axis=1), counts)
        widths = np.flatnonzero(found)
        return dict(zip(widths.tolist(), found[widths].tolist(), strict=True))

    def up_to(self, tokens: int) -> Documents:
        """Return the documents of which no sequence has more tokens before any cutting.

        Raises:
            ValueError: their order is kept.
        """
        if self.order is not None:
            raise ValueError("documents in the order of the dataset cannot be left out by length")
        groups = self.groups.rows()
        left = groups[:, 2:].max(axis=1) <= tokens
        return Documents(Table(groups[left].T), trained=self.trained and Table(self.trained.rows()[left].T))

    def counted(self, max_length: int | None, *, dropping: bool = True) -> Numbers:
        """Return the most tokens that the loss can count in each of :meth:`kept`; shape (documents,).

        The tokens before the maximum length at which a document is kept are not counted, and those behind a cut are
        lost: where TRL cuts the beginning, it keeps a document at any length.
        """
        import numpy as np

        groups = self.groups.rows()
        kept = groups[:, 1] <= max_length if dropping and max_length is not None else slice(None)
        needs, whole = groups[kept, 1:2], groups[kept, 2:]
        sequences = np.minimum(whole, self.longest if max_length is None else max_length)
        tokens: Numbers = sequences.sum(axis=1, dtype=np.int64)
        if self.trained is None:
            return tokens
        own = self.trained.rows()[kept, 0]
        behind = (sequences - needs + 1).clip(min=0).sum(axis=1, dtype=np.int64)
        return np.where((sequences < whole).any(axis=1), np.minimum(own, behind), own)

    def in_order(self, max_length: int | None, *, dropping: bool = True) -> Numbers:
        """Return the documents that are kept at a maximum length, uncut, in the order of the dataset.

        Its shape is (documents, numbers of a document). Without a known order, equal documents follow one another.
        """
        return self._in_order(self.groups, max_length, dropping=dropping)[:, 1:]

    def trained_in_order(self, max_length: int | None, *, dropping: bool = True) -> Numbers | None:
        """Return the tokens that the loss counts in each of :meth:`in_order`; None where they are not known."""
        return None if self.trained is None else self._in_order(self.trained, max_length, dropping=dropping)[:, 0]

    def _in_order(self, of_groups: Table, max_length: int | None, *, dropping: bool) -> Numbers:
        """Return the rows of a table with one for each group, for each document that is kept, in their order."""
        groups, found = self.groups.rows(self.order), of_groups.rows(self.order)
        if self.order is None:
            groups, found = (rows.repeat(groups[:, 0], axis=0) for rows in (groups, found))
        return found if max_length is None or not dropping else found[groups[:, 1] <= max_length]

    def tokens_kept(self, max_length: int | None, *, dropping: bool = True) -> int:
        """Return the tokens that are left at a maximum length."""
        return _at(_tokens_at(self, dropping=dropping and max_length is not None), max_length)

    def coverage(self, max_length: int | None, *, dropping: bool = True) -> float:
        """Return the share of tokens, 0 to 1, that is left at a maximum length."""
        return self.tokens_kept(max_length, dropping=dropping) / self.tokens

    def least_coverage(self, max_length: int | None, *, dropping: bool = True) -> float:
        """Return the least share, 0 to 1, that is left at a maximum length: of all tokens, or of those that count.

        The tokens that the loss counts are taken for the last ones, as answers are: a token that is cut from a document
        is one of them, as long as it has any.
        """
        kept = self.coverage(max_length, dropping=dropping)
        if self.trained is None or max_length is None:
            return kept
        groups, own = self.groups.rows(), self.trained.rows()[:, 0]
        left = (own - (groups[:, 2:] - max_length).clip(min=0).sum(axis=1)).clip(min=0)
        if dropping:
            left[groups[:, 1] > max_length] = 0
        return min(kept, float(groups[:, 0] @ left / (groups[:, 0] @ own)))

    def rows_kept(self, max_length: int | None, *, whole: bool = False) -> int:
        """Return how many documents are kept at a maximum length: all of them, or those that are not cut."""
        return _at(_rows_at(self, whole=whole), max_length)

    def shortest_covering(self, coverage: float) -> int:
        """Return the smallest maximum length, in tokens, that keeps a document, and ``coverage``, 0 to 1, of tokens.

        It keeps as much of the tokens that the loss counts.
        """
        covers = _tokens_at(self, dropping=True) / self.tokens >= coverage
        shortest = max(self.first_kept, int(covers.argmax()))
        if self.trained is None:
            return shortest
        lengths = range(self.longest + 1)
        return bisect_left(lengths, coverage, lo=min(shortest, self.longest), hi=self.longest, key=self.least_coverage)


@lru_cache(_REMEMBERED)
def _tokens_at(documents: Documents, *, dropping: bool) -> Numbers:
    """Return the tokens that are left at each maximum length.

    Args:
        dropping: whether documents that need a larger one are dropped.
    """
    import numpy as np

    # From the length on at which it is kept, a sequence has a token more with each length until it is whole.
    first, further = np.zeros((2, documents.longest + 1), dtype=np.int64)
    for part in documents.groups.parts():
        counts, needs = part[:, 0], part[:, 1] * dropping
        for tokens in part[:, 2:].T:
            np.add.at(first, needs, counts * np.minimum(tokens, needs))
            np.add.at(further, needs, counts)
            np.add.at(further, np.maximum(tokens, needs), -counts)
    further = further.cumsum().cumsum()
    first = first.cumsum()
    first[1:] += further[:-1]
    return first


@lru_cache(_REMEMBERED)
def _rows_at(documents: Documents, *, whole: bool) -> Numbers:
    """Return the documents that are kept at each maximum length: whole ones alone, or those that are cut as well."""
    import numpy as np

    found = np.zeros(documents.longest + 1, dtype=np.int64)
    for part in documents.groups.parts():
        np.add.at(found, part[:, 1 : None if whole else 2].max(axis=1), part[:, 0])
    return found.cumsum()


def _at(by_length: Numbers, max_length: int | None) -> int:
    return int(by_length[-1 if max_length is None else min(max_length, len(by_length) - 1)])
