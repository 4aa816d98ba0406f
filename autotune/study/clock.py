"""The time limit of a search."""

from __future__ import annotations

import time


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
