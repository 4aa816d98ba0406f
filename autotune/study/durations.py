"""The time limit of a search, and the number of short runs in the time that they may take."""

from __future__ import annotations

import time
from collections.abc import Iterable

from autotune.study.problem import Purpose, Record

WHOLE_STEPS = 4
"""Minimum number of whole optimizer steps of a longer run: warm-up, two timed steps, and the worst batch again."""

_MIN_SHORT_RUNS = 2
"""Minimum number of short runs of winner and baseline, each, for an interval."""

_MIN_SECONDS = 300.0
"""Time for the comparison, even after a short search."""

_LIMIT_SHARE = 1 / 3
"""Maximum share of a time limit for the comparison, so that time remains for candidates. With 300 s for the comparison,
a search of 200 s on an H100 ended after two candidates."""

_PROBES_SHARE = 0.5
"""Time for the comparison as a share of the time of the probes that fitted, if that is longer."""

_EXPLORING = frozenset({Purpose.BASELINE, Purpose.RECIPE, Purpose.SEARCH})


class Clock:
    """Counts down from the time limit, starting at construction; without a limit there is always time left."""

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


def pair_seconds(winner: Record, baseline: Record | None) -> float:
    """Return an estimate, in seconds, of one short run of each of the two: the time of their probes; 0 if unknown."""
    ran = {record.number: record.measurement for record in (winner, baseline) if record is not None}
    return sum(measurement.wall_seconds for measurement in ran.values() if measurement.ok)


def short_runs(seconds: float, records: Iterable[Record], max_runs: int, limit_seconds: float | None) -> int:
    """Return the number of short runs of each of the two: fewer if they take long, but at least two.

    Args:
        seconds: of one short run of each, from :func:`pair_seconds`; 0 if unknown.
        records: all records; short runs may take a share of the time of their probes.
        max_runs: maximum number of short runs.
        limit_seconds: the search's time limit, or None.
    """
    if not seconds:
        return max_runs
    # Probes of contributions follow the comparison and must not change its length.
    probe_seconds = sum(
        record.measurement.wall_seconds for record in records if record.measurement.ok and record.purpose in _EXPLORING
    )
    min_seconds = _MIN_SECONDS if limit_seconds is None else min(_MIN_SECONDS, _LIMIT_SHARE * limit_seconds)
    return min(max_runs, max(_MIN_SHORT_RUNS, round(max(min_seconds, _PROBES_SHARE * probe_seconds) / seconds)))
