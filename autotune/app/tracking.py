"""Runs the search of a plan, and reports progress and the best candidates so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate, distinct
from autotune.core.events import Event, Listener, Noted, Ranked, Tracing
from autotune.planning.evaluator import Evaluator
from autotune.reporting.words import differences
from autotune.study.improvement import MAX_TRACED, search_by_traces
from autotune.units import format_bytes, plural

_USUAL_CANDIDATES = 60
"""Candidates that a search usually traces: 40 to 100 for the 8B shape."""
_RANKED_SHOWN = 5


class Tracking(AbstractContextManager["Tracking"]):
    """Runs the candidates of a plan's searches, and reports progress over all calls of the tracer to a listener.

    As a context manager, it reports the best candidate so far if the context is interrupted.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, listener: Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener = listener
        self._clock = clock
        self._started_seconds = 0.0
        self._evaluator: Evaluator | None = None
        self._usual = self._to_come = self._earlier = self._earlier_new = 0

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        evaluator = self._evaluator
        if evaluator is None or error is None or not issubclass(error, KeyboardInterrupt):
            return
        best = next(iter(evaluator.ranked()), None)
        if best is not None and best.memory is not None:
            needs, budget = format_bytes(best.memory.device_bytes), format_bytes(evaluator.budget_bytes)
            traced = plural(len(evaluator.candidates), "traced candidate")
            device = evaluator.problem.setting.machine.device.name
            choices = differences(best.candidate, evaluator.problem.baseline)
            found = f"The best of {traced} so far on {device} is predicted to need"
            if not best.fits:
                found = f"None of {traced} so far fits {device}: the least needs"
            self._listener(Noted(f"{found} {needs} of {budget}: {choices}."))
        if evaluator.traces.cache.is_enabled:
            self._listener(Noted("Finished traces are cached: the same command continues from there."))

    def pass_on(self, event: Event) -> None:
        """Forward an event of the tracer; progress of a single call becomes progress over all calls of a search."""
        if isinstance(event, Tracing) and self._evaluator is not None:
            traces, left = self._evaluator.traces, event.expected - event.done + self._to_come
            done = traces.count - self._earlier + event.done
            run = traces.new_count - self._earlier_new + event.done
            seconds = (self._clock() - self._started_seconds) * left / run if run else None
            event = Tracing(done, done + left, seconds)
        self._listener(event)

    def search(
        self,
        evaluator: Evaluator,
        starts: Sequence[Candidate] | None = None,
        limit: int = MAX_TRACED,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Search the space of an evaluator's problem, and return whether the search was complete.

        Args:
            starts: candidates to trace first, after the baseline; None: the recipes.
            limit: maximum number of candidates to trace.
            goes_on: returns whether to continue once a legal candidate was traced.
        """
        self._evaluator, self._started_seconds = evaluator, self._clock()
        self._earlier, self._earlier_new = evaluator.traces.count, evaluator.traces.new_count
        self._usual = min(_USUAL_CANDIDATES, limit, evaluator.problem.size)
        ended = search_by_traces(
            evaluator.problem, self, starts=starts, limit=limit, goes_on=lambda: not evaluator.candidates or goes_on()
        )
        self._to_come = 0
        return ended

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Run candidates of the search, and report the current ranking."""
        evaluator = self._evaluator
        assert evaluator is not None
        found = evaluator.run(candidates)
        traced = len(evaluator.candidates)
        self._to_come = (evaluator.traces.count - self._earlier) * max(0, self._usual - traced) // max(1, traced)
        best = distinct((each for each in evaluator.ranked() if each.memory is not None), _RANKED_SHOWN)
        if best:
            self._listener(Ranked(best, evaluator.problem.baseline))
        return found
