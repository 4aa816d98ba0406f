"""Selects the records that may be recommended, and the leading one of them."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.spread import TIE
from autotune.study.comparison import failed
from autotune.study.judge import Judge
from autotune.study.problem import Record

MAX_DROP = 0.03
"""Relative distance of a confirmed rate below an unconfirmed one for which the latter is confirmed too, unless it is
within the prediction interval of the confirmed runs."""


def fastest(records: Iterable[Record]) -> Record | None:
    """Return the record with the highest token rate or, among records that tie with it, the smallest need."""
    running = list(records)
    if not running:
        return None
    top = max(record.tokens_per_second for record in running)
    tied = [record for record in running if record.tokens_per_second * (1 + TIE) >= top]
    return min(tied, key=lambda record: (record.measurement.need_bytes or 0, -record.tokens_per_second, record.number))


def standing(records: Iterable[Record], judge: Judge) -> list[Record]:
    """Return the records that may be recommended: legal and without a failed run."""
    known = tuple(records)
    out = {record.number for record in failed(known)}
    return [record for record in known if judge.eligible(record) and record.number not in out]


def leader(records: Iterable[Record], judge: Judge, *, confirm_more: bool = True) -> Record | None:
    """Return the record to recommend so far, confirmed or not.

    A record with a failed run never leads, nor does the baseline after a failed run in turn with another record. Among
    confirmed records, those with several runs precede those with one. The fastest of them leads, unless another was
    faster in its only run than this one is expected to be in a further run (:func:`_expected_high`); an unconfirmed one
    only if ``confirm_more``.
    """
    running = standing(records, judge)
    confirmed = [record for record in running if record.confirmed]
    best = fastest(record for record in confirmed if len(record.rates) > 1) or fastest(confirmed)
    if best is None:
        return fastest(running)
    for challenger in (fastest(running) if confirm_more else None, fastest(confirmed)):
        if challenger is not None and challenger.tokens_per_second > _expected_high(best):
            return challenger
    return best


def _expected_high(record: Record) -> float:
    """Return the highest rate that is expected in a further run of a confirmed record.

    With several runs, it is the upper end of the prediction interval for a further run: a lower rate in one run of
    another candidate does not distinguish the two.
    """
    expected = record.prediction_interval
    tolerated = record.tokens_per_second * (1 + MAX_DROP)
    return tolerated if expected is None else max(tolerated, expected.high)
