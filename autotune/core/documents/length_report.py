"""The document of ``autotune lengths``: a dataset's row lengths, and the share within each maximum length."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autotune.core.documents.short_repr import ShortRepr
from autotune.core.rows.documents import Documents
from autotune.core.workload import Workload

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
COVERAGES = (0.9, 0.95, 0.99, 0.999)
MAX_BINS = 24
SHORTEST_LIMIT = 128


@dataclass(frozen=True)
class LengthQuantile:
    """The length, in tokens, that a ``share`` (0 to 1) of the rows do not exceed."""

    share: float
    tokens: int


@dataclass(frozen=True)
class LengthBin:
    """The rows whose length lies between two bounds, both included; of several sequences, the longest counts.

    Attributes:
        low, high: bounds in tokens.
        rows: number of rows in the bin.
        tokens: number of tokens in all sequences of these rows.
    """

    low: int
    high: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class LengthLimit:
    """The tokens and rows that a ``max_length`` keeps; longer rows are cut or dropped.

    Attributes:
        coverage: share of tokens, 0 to 1, that is kept.
        rows_cut: rows that are cut.
        tokens_dropped: tokens that are cut or dropped, over all rows.
        rows_dropped: rows that the trainer drops whole, such as those whose prompt alone fills the length.
        row_coverage: share of rows, 0 to 1, that is kept, whole or cut.
    """

    max_length: int
    coverage: float
    rows_cut: int
    tokens_dropped: int
    rows_dropped: int = 0
    row_coverage: float = 1.0


@dataclass(frozen=True, repr=False)
class LengthReport(ShortRepr):
    """The document of ``autotune lengths``.

    Attributes:
        rows, tokens: number in the whole dataset, before any truncation.
        mean: tokens per row.
        quantiles: ascending by share.
        histogram: ascending by length; bounds grow geometrically, since lengths are long-tailed.
        limits: ascending by maximum length, without those with which TRL would fail on a row with images; the last one
            cuts and drops nothing.
    """

    schema: int = field(default=1, kw_only=True)
    workload: Workload
    rows: int
    tokens: int
    mean: float
    quantiles: tuple[LengthQuantile, ...]
    histogram: tuple[LengthBin, ...]
    limits: tuple[LengthLimit, ...]

    @property
    def written(self) -> LengthReport:
        """The report for a document, without the sizes of each row."""
        return replace(self, workload=self.workload.summary)


def length_report(workload: Workload) -> LengthReport:
    """Return the report on the token lengths of the workload's dataset."""
    lengths, documents = workload.dataset.lengths, workload.dataset.documents
    return LengthReport(
        workload=workload,
        rows=documents.rows,
        tokens=documents.tokens,
        mean=documents.tokens / documents.rows,
        quantiles=tuple(LengthQuantile(share, lengths.quantile(share)) for share in QUANTILES),
        histogram=histogram(documents),
        limits=tuple(limit(documents, max_length) for max_length in _max_lengths(documents, workload.least_length)),
    )


def limit(documents: Documents, max_length: int, *, dropping: bool = True) -> LengthLimit:
    """Return the tokens and rows that a maximum length, in tokens, keeps and drops.

    Args:
        dropping: as for :meth:`Documents.kept`; rows that are not dropped are cut.
    """
    whole = documents.rows_kept(max_length, whole=True)
    kept = documents.rows_kept(max_length) if dropping else documents.rows
    return LengthLimit(
        max_length=max_length,
        coverage=documents.coverage(max_length, dropping=dropping),
        rows_cut=kept - whole,
        tokens_dropped=documents.tokens - documents.tokens_kept(max_length, dropping=dropping),
        rows_dropped=documents.rows - kept,
        row_coverage=kept / documents.rows,
    )


def histogram(documents: Documents) -> tuple[LengthBin, ...]:
    """Return at most :data:`MAX_BINS` bins from the shortest row to the longest, empty ones included."""
    import numpy as np

    widths, *counts = documents.by_width()
    shortest, longest = int(widths[0]), int(widths[-1])
    halves = [bound for bound in _bounds(longest) if bound >= shortest]
    powers = [bound for bound in halves if bound & (bound - 1) == 0 or bound == halves[-1]]
    bounds = halves if len(halves) <= MAX_BINS else powers
    places = np.searchsorted(bounds, widths)
    sums = (np.bincount(places, each, len(bounds)).astype(int).tolist() for each in counts)
    lows = (below + 1 for below in (shortest - 1, *bounds))
    bins = zip(lows, bounds, *sums, strict=False)
    return tuple(LengthBin(low, min(high, longest), rows, tokens) for low, high, rows, tokens in bins)


def _bounds(longest: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, 24, … up to the first that is not below ``longest``."""
    bounds, power = [1], 2
    while bounds[-1] < longest:
        bounds += [power, power + power // 2]
        power *= 2
    return [bound for bound in bounds if bound < longest] + [min(bound for bound in bounds if bound >= longest)]


def _max_lengths(documents: Documents, least: int) -> list[int]:
    """Return powers of two below the longest row, the lengths that reach :data:`COVERAGES`, and the longest row's.

    Args:
        least: the least possible length, which replaces the shorter ones.
    """
    longest, covering = documents.longest, map(documents.shortest_covering, COVERAGES)
    powers = (SHORTEST_LIMIT << doubled for doubled in range(longest.bit_length()))
    return sorted({max(least, each) for each in (*covering, *(power for power in powers if power < longest), longest)})
