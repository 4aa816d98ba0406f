"""The time limit of a search, and the clock of the leases by which workers know of one another."""

from __future__ import annotations

import time


def elapsed_seconds() -> float:
    """Return the seconds since a moment in the past, those during which the machine was suspended included.

    Where the system has no such clock, suspension is not counted.
    """
    # Linux: CLOCK_MONOTONIC, which Python's monotonic clock is, stands still while the machine is suspended.
    counting = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if counting is None else time.clock_gettime(counting)


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
