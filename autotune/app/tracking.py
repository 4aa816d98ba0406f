"""Traces what the answer of a plan stands on, and tells meanwhile how far that is and what is the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from autotune.core.estimate import Estimate, distinct
from autotune.core.events import Event, Listener, Ranked, StageStarted, Tracing
from autotune.planning.changes import smallest_changes
from autotune.planning.climbing import climb
from autotune.planning.planner import Planner
from autotune.planning.tracing.store import Traces
from autotune.trainers.problem import TrainerProblem

# Technique combinations that are traced before the first ranking. Those of the answer are traced in any case, so that
# fewer are enough here than for a search, which has to know what to veto.
_EXPLORED = 28
# Technique combinations that are traced at once: first the baseline's, for a first ranking after a few seconds, then
# those of recipes; then many, since each time costs about a second: processes start, and wait for each other at the
# end.
_AT_ONCE = (1, 3, 12)
# Most candidates that are traced at their own sizes after the first ranking, for each that is shown.
_REFINED = 4
_TOLD = 5


class Tracking:
    """Tells a listener how far the traces of a plan are, whatever number of calls of the tracer they take.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, listener: Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener = listener
        self._clock = clock
        self._started_seconds = 0.0
        self._planner: Planner | None = None
        self._traces: Traces | None = None

    def hear(self, event: Event) -> None:
        """Pass an event of the tracer on; the stages of its single calls are not told."""
        match event:
            case Tracing():
                self._listener(self._of_all(event))
            case StageStarted():
                pass
            case _:
                self._listener(event)

    def trace(self, problem: TrainerProblem, planner: Planner, traces: Traces, top: int) -> None:
        """Trace what is shown of the ranking, the baseline and the smallest changes at their own sizes.

        Where the planner's candidates are a sample, better ones are looked for outside of it and added.

        Args:
            top: number of distinct candidates to show.
        """
        self._planner, self._traces = planner, traces
        self._started_seconds = self._clock()
        self._listener(StageStarted("Tracing training steps with no GPU"))
        planner.trace([problem.baseline])
        planner.explore(_EXPLORED, at_once=_AT_ONCE, goes_on=lambda: self._told(problem, planner))
        self.refine(problem, planner, top)
        if climb(problem, planner, goes_on=lambda: self._told(problem, planner)):
            self.refine(problem, planner, top)

    def refine(self, problem: TrainerProblem, planner: Planner, top: int) -> None:
        """Trace what is shown of the ranking at its own sizes, as far as it was not."""
        baseline = problem.baseline

        def wanted(ranked: Sequence[Estimate]) -> Iterator[Estimate]:
            shown, start = distinct(ranked, top), planner.estimate(baseline)
            yield from shown[:1]
            yield start
            yield from (change.instead for change in smallest_changes([start], ranked))
            yield from shown
            yield from (change.instead for change in smallest_changes(shown, ranked))

        planner.refine(wanted, _REFINED * (top + 2), goes_on=lambda: self._told(problem, planner))

    def _told(self, problem: TrainerProblem, planner: Planner) -> bool:
        self._planner = planner
        best = planner.traced(_TOLD)
        if best:
            self._listener(Ranked(best, problem.baseline))
        return True

    def _of_all(self, event: Tracing) -> Tracing:
        """Return how far all traces are, given how far those of one call are."""
        if self._planner is None or self._traces is None:
            return event
        run, left = self._traces.new_count + event.done, event.expected - event.done + self._planner.to_come
        remaining = (self._clock() - self._started_seconds) * left / run if run else None
        done = self._traces.count + event.done
        return Tracing(done, done + left, remaining)
