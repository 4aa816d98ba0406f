"""The alternating short runs of a winner and the baseline: which is next, which form pairs, and whose they are."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.measurement import Measurement, Schedule
from autotune.study.problem import ComparisonTurn, Purpose, Record

_FEWEST = 2
"""Short runs of each of the two that an interval needs."""

_LEAST_SECONDS = 300.0
"""A comparison may take this long, however short the search was."""

_SHARE_OF_LIMIT = 1 / 3
"""With a time limit, it may take no more than this share of it, so that candidates have time too. With 300 s for it, a
search of 200 s on an H100 ended after two candidates."""

_SHARE_OF_PROBES = 0.5
"""It may take this share of the time of the probes that fitted, if that is longer."""

_EXPLORING = frozenset({Purpose.BASELINE, Purpose.RECIPE, Purpose.SEARCH})


def pair_seconds(winner: Record, baseline: Record | None, schedule: Schedule) -> float:
    """Return the most seconds that a short run of each of the two takes, estimated from their probes."""
    ran = {record.number: record.measurement for record in (winner, baseline) if record is not None}
    return sum(_run_seconds(measurement, schedule) for measurement in ran.values() if measurement.ok)


def _run_seconds(probed: Measurement, schedule: Schedule) -> float:
    """Return the most seconds that a run with a schedule takes; 0 where the probe's time is not known."""
    if not probed.wall_seconds:
        return 0.0
    fewest = schedule.min_micro_batches * (probed.micro_batch_seconds or 0.0)
    return untimed_seconds(probed) + max(schedule.max_seconds, fewest)


def untimed_seconds(probed: Measurement) -> float:
    """Return the seconds of a probe outside of timed micro-batches: its start, warm-up and worst batch."""
    return max(0.0, probed.wall_seconds - probed.micro_batches_timed * (probed.micro_batch_seconds or 0.0))


def short_runs(seconds: float, records: Iterable[Record], most: int, limit_seconds: float | None) -> int:
    """Return the number of short runs of each of the two: fewer where they take long, but two at least.

    Args:
        seconds: of one short run of each, from :func:`pair_seconds`; 0: not known.
        records: all of the search; a share of the time of its probes may go into short runs.
        most: number of short runs where they are quick.
        limit_seconds: of the search; None: it has no time limit.
    """
    if not seconds:
        return most
    # A probe that a contribution needs comes after the comparison and must not change its length.
    probing = sum(
        record.measurement.wall_seconds
        for record in records
        if record.measurement.ok and record.purpose in _EXPLORING and record.measurement.wall_seconds
    )
    least = _LEAST_SECONDS if limit_seconds is None else min(_LEAST_SECONDS, _SHARE_OF_LIMIT * limit_seconds)
    return min(most, max(_FEWEST, round(max(least, _SHARE_OF_PROBES * probing) / seconds)))


def next_turn(winner: Record, baseline: Record | None, comparisons: int) -> ComparisonTurn | None:
    """Return the next short run of a comparison, or None when it is complete.

    In even pairs the winner runs first, in odd ones the baseline, so that a machine that steadily becomes slower or
    faster favours neither. If the baseline is the winner, or did not run, only the winner runs.

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
    """Return the measurements after a record's probe: its own runs, for the baseline those in turn with a winner."""
    others = (other for other in records if other.number != record.number)
    in_turn = (run.measurement for other in others for run in other.comparison if run.number == record.number)
    return (*record.runs, *in_turn)


def failed(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records that had a run after the probe, in turn with any winner too, that did not end ``ok``."""
    known = tuple(records)
    return tuple(record for record in known if not all(run.ok for run in runs_after(record, known)))


def _runs_beside(winner: Record, baseline: Record) -> bool:
    """Whether the baseline alternates with a winner: it stops after a run that failed."""
    ran = (baseline.measurement, *runs_beside(winner))
    return baseline.number != winner.number and all(run.ok for run in ran)
