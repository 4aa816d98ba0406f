"""Which record leads, which of two is better, and whether a search still gets anywhere."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.study.judge import Judge
from autotune.study.problem import Purpose, Record

TIE = 0.02
"""Token rates within this share of each other are equal: a probe knows its rate to a few percent at best."""

LIGHTER = 0.1
"""Of two that are equally fast, one that needs this share less memory is worth a confirmation of its own."""

DISAPPOINTMENT = 0.03
"""A confirmed rate this share below an unconfirmed one calls for that one's confirmation too."""


def fastest(records: Iterable[Record]) -> Record | None:
    """Return the record of the highest token rate, or of the smallest peak memory among those that tie with it."""
    running = list(records)
    if not running:
        return None
    top = max(record.tokens_per_second for record in running)
    tied = [record for record in running if record.tokens_per_second * (1 + TIE) >= top]
    return min(tied, key=lambda record: (record.measurement.peak_bytes or 0, -record.tokens_per_second, record.number))


def leader(records: Iterable[Record], judge: Judge, *, confirm_more: bool = True) -> Record | None:
    """Return the record to recommend as things stand, confirmed or not.

    A confirmed one leads unless an unconfirmed one was faster by more than :data:`DISAPPOINTMENT`, or equally fast and
    :data:`LIGHTER`, and there may be ``confirm_more``. One whose confirmation failed never leads.
    """
    running = [
        record
        for record in records
        if judge.eligible(record) and (record.confirmation is None or record.confirmation.ok)
    ]
    confirmed = fastest(record for record in running if record.confirmed)
    first = fastest(running)
    if first is None or confirmed is None or first.confirmed:
        return first
    disappointed = first.tokens_per_second > confirmed.tokens_per_second * (1 + DISAPPOINTMENT)
    lighter = (first.measurement.peak_bytes or 0) < (confirmed.measurement.peak_bytes or 0) * (1 - LIGHTER)
    return first if confirm_more and (disappointed or lighter) else confirmed


def probes_without_improvement(records: Iterable[Record], judge: Judge) -> int:
    """Return how many search probes in a row brought nothing faster by more than :data:`TIE`; 0 while nothing fits.

    As long as nothing fits, giving up early would be a claim that nothing can.
    """
    best, count = 0.0, 0
    for record in records:
        rate = (record.measurement.tokens_per_second or 0.0) if judge.eligible(record) else 0.0
        if rate > best * (1 + TIE):
            best, count = rate, 0
        elif best and record.probed and record.purpose is Purpose.SEARCH:
            count += 1
    return count
