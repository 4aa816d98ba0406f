"""The lengths of a dataset's documents, and the documents and tokens that a maximum length keeps of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from autotune.core.rows.lengths import LengthDistribution
from autotune.core.rows.table import Table

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

_CACHED = 16
"""Datasets whose counts by maximum length are cached; a training has rows to train and to evaluate on."""
NEVER_KEPT = (1 << 31) - 1
"""In place of the smallest maximum length: TRL drops the document with any, and keeps it without one."""
Document = tuple[Any, ...]
"""A document: the smallest maximum length at which it is kept, then the tokens of each of its sequences that pass
through the model, before any cutting. Each is a number, or an array with a number for each row of a dataset. The first
is :data:`NEVER_KEPT` if no maximum length keeps it.

Examples: a conversation of 700 tokens is ``(1, 700)``: it can be cut anywhere. A preference pair with a prompt of 100
tokens, a chosen answer of 50 and a rejected one of 80 is ``(101, 150, 180)`` for DPO: it is dropped if no token of the
answers would be left. For a reward model, it is ``(180, 150, 180)``: it is never cut, but dropped if one sequence is
too long.
"""


@dataclass(frozen=True, eq=False)
class Documents:
    """The lengths of a dataset's documents. A document is a row of the dataset; for KTO, a pair is two documents.

    Equal documents form a group. Millions of documents may all be distinct, so there is no Python object for each.
    Instances compare by identity, which makes them cheap keys of caches.

    Attributes:
        groups: a row of the table for each group, ``(count, *document)``; at least one.
        order: for each document in the order of the dataset, the index of its group; None if no micro-batch depends on
            the order.
        trained: for each group, the tokens of a document that the loss counts; None if it counts all, or that is not
            known.
        keeps_end: whether TRL cuts documents at their beginning (``truncation_mode=keep_end``) unless it packs them.
    """

    groups: Table
    order: Table | None = None
    trained: Table | None = None
    keeps_end: bool = False

    @classmethod
    def of_groups(cls, groups: Iterable[tuple[int, ...]]) -> Documents:
        """Return documents from groups, ``(count, *document)``."""
        return cls(Table(list(zip(*groups, strict=True))))

    @classmethod
    def of_lengths(cls, lengths: LengthDistribution) -> Documents:
        """Return documents of one sequence each that can be cut anywhere."""
        return cls.of_groups((count, 1, tokens) for tokens, count in lengths.counts.items())

    @classmethod
    def of_rows(cls, rows: Any, *, ordered: bool, trained: Any = None, keeps_end: bool = False) -> Documents:
        """Return the documents of a dataset.

        Args:
            rows: the document of each row, an array of shape (rows, numbers of a document); not empty.
            ordered: whether to keep their order.
            trained: the tokens of each row that the loss counts, an array of shape (rows,); None: not known.
            keeps_end: see :attr:`keeps_end`.
        """
        import numpy as np

        rows = np.asarray(rows) if trained is None else np.column_stack([rows, trained])
        # By column, since np.unique of whole rows takes twice the memory.
        places = np.zeros(len(rows), dtype=np.int64)
        for column in rows.T:
            places = np.unique(places * (int(column.max()) + 1) + column, return_inverse=True)[1]
        _, first, counts = np.unique(places, return_index=True, return_counts=True)
        columns = [counts, *rows[first].T]
        counted = None if trained is None else Table([columns.pop()])
        return cls(Table(columns), Table([places]) if ordered else None, counted, keeps_end)

    @property
    def sequences(self) -> int:
        """Sequences of each document that pass through the model."""
        return self.groups.width - 2

    @cached_property
    def rows(self) -> int:
        """Number of documents."""
        return sum(int(part[:, 0].sum()) for part in self.groups.parts())

    @cached_property
    def unkept(self) -> int:
        """Number of documents that no maximum length keeps."""
        return self.rows - self.rows_kept(self.longest)

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
        return max(int(part[:, 1:].max(where=part[:, 1:] < NEVER_KEPT, initial=0)) for part in self.groups.parts())

    def capped(self, max_length: int | None) -> int:
        """Return the smallest maximum length with the same effect on all documents; None: nothing is cut or dropped."""
        return self.longest if max_length is None else min(max_length, self.longest)

    def _largest_need(self, max_length: int | None, *, dropping: bool) -> int:
        """Return the most that a document may need to be kept, in tokens."""
        return self.capped(max_length) if dropping and max_length is not None else NEVER_KEPT

    def kept(self, max_length: int | None, *, dropping: bool = True) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield the counts of distinct documents that a maximum length keeps, and the tokens of their cut sequences.

        Their shapes are (documents,) and (documents, sequences).

        Args:
            max_length: tokens to which sequences are cut; None: they are not cut.
            dropping: whether documents that need a larger maximum length are dropped; TRL does not drop when it packs.
        """
        length, most = self.capped(max_length), self._largest_need(max_length, dropping=dropping)
        for part in self.groups.parts():
            left = part[part[:, 1] <= most]
            yield left[:, 0], left[:, 2:].clip(max=length)

    @cached_property
    def widths(self) -> Mapping[int, int]:
        """The number of documents by the tokens of their longest sequence before any cutting, ascending."""
        widths, counts, _ = self.by_width()
        return dict(zip(widths.tolist(), counts.tolist(), strict=True))

    def by_width(self, max_length: int | None = None, *, dropping: bool = True) -> tuple[Numbers, Numbers, Numbers]:
        """Return the kept documents by width, which is the tokens of a document's longest sequence.

        Returns:
            The widths, ascending, the number of documents of each, and the tokens of all their sequences; each of shape
            (widths,).
        """
        import numpy as np

        counts, tokens = np.zeros((2, self.longest + 1), dtype=np.int64)
        for some, sequences in self.kept(max_length, dropping=dropping):
            width = sequences.max(axis=1)
            np.add.at(counts, width, some)
            np.add.at(tokens, width, some * sequences.sum(axis=1))
        widths = np.flatnonzero(counts)
        return widths, counts[widths], tokens[widths]

    def up_to(self, tokens: int) -> Documents:
        """Return the documents whose longest sequence has at most ``tokens`` tokens before any cutting.

        Raises:
            ValueError: the documents have an order.
        """
        if self.order is not None:
            raise ValueError("documents in the order of the dataset cannot be left out by length")
        groups = self.groups.rows()
        left = groups[:, 2:].max(axis=1) <= tokens
        trained = self.trained and Table(self.trained.rows()[left].T)
        return Documents(Table(groups[left].T), trained=trained, keeps_end=self.keeps_end)

    def max_loss_tokens(self, max_length: int | None, *, dropping: bool = True) -> Numbers:
        """Return an upper bound of the tokens that the loss counts in each of :meth:`kept`; shape (documents,).

        From the end that TRL keeps, the tokens before the smallest maximum length that keeps a document are not
        counted, and those after a cut are lost.
        """
        import numpy as np

        groups, length = self.groups.rows(), self.capped(max_length)
        kept = groups[:, 1] <= self._largest_need(max_length, dropping=dropping)
        needs, whole = groups[kept, 1:2], groups[kept, 2:]
        sequences = np.minimum(whole, length)
        tokens: Numbers = sequences.sum(axis=1, dtype=np.int64)
        if self.trained is None:
            return tokens
        own = self.trained.rows()[kept, 0]
        behind = (sequences - needs + 1).clip(min=0).sum(axis=1, dtype=np.int64)
        counted: Numbers = np.where((sequences < whole).any(axis=1), np.minimum(own, behind), own)
        return counted

    def in_order(self, max_length: int | None, *, dropping: bool = True) -> Numbers:
        """Return the documents that a maximum length keeps, uncut, in the order of the dataset.

        The shape is (documents, numbers of a document). Without a known order, equal documents are adjacent.
        """
        return self._in_order(self.groups, max_length, dropping=dropping)[:, 1:]

    def trained_in_order(self, max_length: int | None, *, dropping: bool = True) -> Numbers | None:
        """Return the tokens that the loss counts in each of :meth:`in_order`; None if they are not known."""
        return None if self.trained is None else self._in_order(self.trained, max_length, dropping=dropping)[:, 0]

    def _in_order(self, of_groups: Table, max_length: int | None, *, dropping: bool) -> Numbers:
        """Return, for each kept document in order, its group's row of a table."""
        groups, found = self.groups.rows(self.order), of_groups.rows(self.order)
        if self.order is None:
            groups, found = (rows.repeat(groups[:, 0], axis=0) for rows in (groups, found))
        return found[groups[:, 1] <= self._largest_need(max_length, dropping=dropping)]

    def tokens_kept(self, max_length: int | None, *, dropping: bool = True) -> int:
        """Return the number of tokens that a maximum length keeps."""
        return int(_tokens_at(self, dropping=dropping and max_length is not None)[self.capped(max_length)])

    def coverage(self, max_length: int | None, *, dropping: bool = True) -> float:
        """Return the share, 0 to 1, that a maximum length keeps of the tokens that any keeps."""
        dropping = dropping and max_length is not None
        whole = self.tokens_kept(self.longest, dropping=dropping)
        return self.tokens_kept(max_length, dropping=dropping) / whole

    def least_coverage(self, max_length: int | None, *, dropping: bool = True) -> float:
        """Return the share, 0 to 1, that a maximum length keeps of all tokens or of those in the loss, if that is less.

        The tokens in the loss are assumed to be the last ones, as answers are, so that they are cut first, or last if
        documents are cut at their beginning.
        """
        kept = self.coverage(max_length, dropping=dropping)
        if self.trained is None:
            return kept
        groups, own, length = self.groups.rows(), self.trained.rows()[:, 0], self.capped(max_length)
        sequences = groups[:, 2:]
        if self.keeps_end and dropping:
            # All sequences of a document have as many tokens outside of the loss.
            answers = sequences - (sequences.sum(axis=1) - own)[:, None] // self.sequences
            left = answers.clip(max=(length - groups[:, 1:2] + 1).clip(min=0)).sum(axis=1)
        else:
            left = (own - (sequences - length).clip(min=0).sum(axis=1)).clip(min=0)
        left[groups[:, 1] > self._largest_need(max_length, dropping=dropping)] = 0
        return min(kept, float(groups[:, 0] @ left / (groups[:, 0] @ own)))

    def rows_kept(self, max_length: int | None, *, whole: bool = False) -> int:
        """Return how many documents a maximum length keeps; with ``whole``, how many it neither drops nor cuts."""
        return self.rows if max_length is None else int(_rows_at(self, whole=whole)[self.capped(max_length)])

    def shortest_covering(self, coverage: float) -> int:
        """Return the smallest maximum length, in tokens, that keeps a document and this share, 0 to 1, of all tokens.

        It keeps the same share of the tokens in the loss.
        """
        covers = _tokens_at(self, dropping=True) / self.tokens_kept(self.longest) >= coverage
        shortest = max(self.first_kept, int(covers.argmax()))
        if self.trained is None:
            return shortest
        lengths = range(self.longest + 1)
        return bisect_left(lengths, coverage, lo=min(shortest, self.longest), hi=self.longest, key=self.least_coverage)


@lru_cache(_CACHED)
def _tokens_at(documents: Documents, *, dropping: bool) -> Numbers:
    """Return the number of tokens that each maximum length keeps.

    Args:
        dropping: whether documents that need a larger one are dropped.
    """
    import numpy as np

    # From the length that keeps it on, a sequence has one more token with each length, until it is whole.
    first, further = np.zeros((2, documents.longest + 1), dtype=np.int64)
    for part in documents.groups.parts():
        left = part[part[:, 1] < NEVER_KEPT] if dropping else part
        counts, needs = left[:, 0], left[:, 1] * dropping
        for tokens in left[:, 2:].T:
            np.add.at(first, needs, counts * np.minimum(tokens, needs))
            np.add.at(further, needs, counts)
            np.add.at(further, np.maximum(tokens, needs), -counts)
    further = further.cumsum().cumsum()
    first = first.cumsum()
    first[1:] += further[:-1]
    return first


@lru_cache(_CACHED)
def _rows_at(documents: Documents, *, whole: bool) -> Numbers:
    """Return how many documents each maximum length keeps; with ``whole``, how many it neither drops nor cuts."""
    import numpy as np

    found = np.zeros(documents.longest + 1, dtype=np.int64)
    for part in documents.groups.parts():
        left = part[part[:, 1] < NEVER_KEPT]
        np.add.at(found, left[:, 1 : None if whole else 2].max(axis=1), left[:, 0])
    return found.cumsum()
