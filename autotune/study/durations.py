"""The time limit of a search, and estimates of the duration of its runs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import fmean

from autotune.core.effort import Effort
from autotune.core.measurement import Measurement, Schedule
from autotune.study.problem import Purpose, Record
from autotune.study.trial_log import TrialLog

WHOLE_STEPS = 4
"""Minimum number of whole optimizer steps of a longer run: warm-up, two timed steps, and the worst batch again."""

_FEWEST = 2
"""Minimum number of short runs of winner and baseline, each, for an interval."""

_LEAST_SECONDS = 300.0
"""Time that a comparison may always take, even after a short search."""

_SHARE_OF_LIMIT = 1 / 3
"""Maximum share of a time limit for the comparison, so that time remains for candidates. With 300 s for the comparison,
a search of 200 s on an H100 ended after two candidates."""

_SHARE_OF_PROBES = 0.5
"""The comparison may take this share of the time of the probes that fitted, if that is longer."""

_EXPLORING = frozenset({Purpose.BASELINE, Purpose.RECIPE, Purpose.SEARCH})


class Clock:
    """Counts down from the time limit, starting at its creation; without a limit there is always time left."""

    def __init__(self, limit_seconds: float | None) -> None:
        self.limit_seconds = limit_seconds
        self._started = time.monotonic()

    def left(self, reserve_seconds: float = 0.0) -> float | None:
        """Return the seconds that are left after a reserve, at least 0, or None without a limit."""
        if self.limit_seconds is None:
            return None
        return max(0.0, self.limit_seconds - reserve_seconds - (time.monotonic() - self._started))

    def over(self, reserve_seconds: float = 0.0) -> bool:
        """Whether no time is left after a reserve."""
        return self.left(reserve_seconds) == 0.0


class Durations:
    """Estimates how long runs take, by those so far."""

    def __init__(self, log: TrialLog, effort: Effort, clock: Clock) -> None:
        self._log = log
        self._effort = effort
        self._clock = clock

    @property
    def _ran(self) -> list[Measurement]:
        return [record.measurement for record in self._log.records if record.measurement.ok]

    @property
    def probe_seconds(self) -> float:
        """Mean seconds of the probes that fitted; 0 before the first."""
        return fmean(each.wall_seconds for each in self._ran) if self._ran else 0.0

    def has_time(self, reserve_seconds: float) -> bool:
        """Whether a further probe probably ends in time, and leaves ``reserve_seconds``."""
        walls = [record.measurement.wall_seconds for record in self._log.records if record.probed]
        usual = self.probe_seconds or (fmean(walls) if walls else 0.0)
        return not self._clock.over(reserve_seconds + usual)

    @property
    def confirmation_seconds(self) -> float:
        """Upper estimate, in seconds, of a winner's longer run."""
        if not self.probe_seconds:
            return 0.0
        slowest = max(each.step_seconds or 0.0 for each in self._ran)
        longest = max(self._effort.confirmation.max_seconds, WHOLE_STEPS * slowest)
        return fmean(map(untimed_seconds, self._ran)) + longest

    def comparisons(self, winner: Record, baseline: Record | None) -> int:
        """Return the number of short runs of a winner and of the baseline, each."""
        seconds = pair_seconds(winner, baseline, self._effort.comparison)
        return short_runs(seconds, self._log.records, self._effort.comparisons, self._clock.limit_seconds)

    def settling_seconds(self, winner: Record | None, baseline: Record | None) -> float:
        """Return an upper estimate, in seconds, of confirmation and comparison; 0 without a winner."""
        if winner is None:
            return 0.0
        seconds = pair_seconds(winner, baseline, self._effort.comparison)
        return self.confirmation_seconds + self.comparisons(winner, baseline) * seconds


def pair_seconds(winner: Record, baseline: Record | None, schedule: Schedule) -> float:
    """Return an upper estimate, in seconds, of one short run of each of the two, from their probes."""
    ran = {record.number: record.measurement for record in (winner, baseline) if record is not None}
    return sum(_run_seconds(measurement, schedule) for measurement in ran.values() if measurement.ok)


def _run_seconds(probed: Measurement, schedule: Schedule) -> float:
    """Return an upper estimate, in seconds, of a run with a schedule; 0 if the probe's time is unknown."""
    if not probed.wall_seconds:
        return 0.0
    fewest = schedule.min_micro_batches * (probed.micro_batch_seconds or 0.0)
    return untimed_seconds(probed) + max(schedule.max_seconds, fewest)


def untimed_seconds(probed: Measurement) -> float:
    """Return the seconds of a probe outside of timed micro-batches: its start, warm-up and worst batch."""
    return max(0.0, probed.wall_seconds - probed.micro_batches_timed * (probed.micro_batch_seconds or 0.0))


def short_runs(seconds: float, records: Iterable[Record], most: int, limit_seconds: float | None) -> int:
    """Return the number of short runs of each of the two: fewer if they take long, but at least two.

    Args:
        seconds: of one short run of each, from :func:`pair_seconds`; 0 if unknown.
        records: all records; short runs may take a share of the time of their probes.
        most: maximum number of short runs.
        limit_seconds: the search's time limit, or None.
    """
    if not seconds:
        return most
    # Probes of contributions follow the comparison and must not change its length.
    probing = sum(
        record.measurement.wall_seconds
        for record in records
        if record.measurement.ok and record.purpose in _EXPLORING and record.measurement.wall_seconds
    )
    least = _LEAST_SECONDS if limit_seconds is None else min(_LEAST_SECONDS, _SHARE_OF_LIMIT * limit_seconds)
    return min(most, max(_FEWEST, round(max(least, _SHARE_OF_PROBES * probing) / seconds)))
