"""The alternating short runs of a winner and the baseline: selects the next run, and the pairs of finished runs."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.measurement import Measurement
from autotune.study.problem import ComparisonTurn, Record

_NARROW = 0.15
"""Share of the mean rate by which the upper end of a narrow range lies above it."""
_MORE = 2
"""Factor of the short runs where the range is wide. If runs scatter by 5 to 10 %, ranges become up to 20 % narrower,
and 92.5 to 99.2 % of further runs are within instead of 94.2 to 99.2 % (each of 20,000 drawn comparisons)."""


def wanted_runs(winner: Record, comparisons: int) -> int:
    """Return the number of short runs of a winner and of the baseline, each: more if their range is wide, or unknown.

    Args:
        comparisons: the number if the range is narrow.
    """
    expected = winner.prediction_interval
    narrow = expected is not None and expected.high <= (1 + _NARROW) * winner.tokens_per_second
    return comparisons if narrow else _MORE * comparisons


def next_turn(winner: Record, baseline: Record | None, comparisons: int) -> ComparisonTurn | None:
    """Return the next short run of a comparison, or None when it is complete.

    In even pairs the winner runs first, in odd ones the baseline, so that steady drift of the machine's speed favours
    neither. If the baseline is the winner, or did not run, only the winner runs.

    Args:
        comparisons: number of short runs of each of the two.
    """
    ours = sum(run.number == winner.number for run in winner.comparison)
    theirs = len(winner.comparison) - ours
    if baseline is None or not _runs_beside(winner, baseline):
        return ComparisonTurn(winner.number, winner.number, ours) if ours < comparisons else None
    pair = min(ours, theirs)
    if pair >= comparisons:
        return None
    winners_turn = pair % 2 == 0 if ours == theirs else ours < theirs
    return ComparisonTurn(winner.number, winner.number if winners_turn else baseline.number, pair)


def pairs(winner: Record) -> tuple[tuple[Measurement, Measurement], ...]:
    """Return the pairs of a winner's comparison in which both runs ended ``ok``, the winner's run first."""
    ours = [run.measurement for run in winner.comparison if run.number == winner.number]
    both = zip(ours, runs_beside(winner), strict=False)
    return tuple((our, their) for our, their in both if our.ok and their.ok)


def runs_beside(winner: Record) -> tuple[Measurement, ...]:
    """Return the baseline's runs in a winner's comparison."""
    return tuple(run.measurement for run in winner.comparison if run.number != winner.number)


def runs_after(record: Record, records: Iterable[Record]) -> tuple[Measurement, ...]:
    """Return the measurements after a record's probe: its own runs and those in comparisons with other records."""
    others = (other for other in records if other.number != record.number)
    in_turn = (run.measurement for other in others for run in other.comparison if run.number == record.number)
    return (*record.runs, *in_turn)


def failed(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records with a later run, including comparisons with any winner, that did not end ``ok``."""
    known = tuple(records)
    return tuple(record for record in known if not all(run.ok for run in runs_after(record, known)))


def _runs_beside(winner: Record, baseline: Record) -> bool:
    """Whether the baseline alternates with a winner: it stops after a run that failed."""
    ran = (baseline.measurement, *runs_beside(winner))
    return baseline.number != winner.number and all(run.ok for run in ran)
