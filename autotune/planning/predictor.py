"""Predicts candidates from traces, and raises the predicted memory after a probe has run out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Origin, memory_key
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError
from autotune.planning.evaluator import Evaluator
from autotune.units import plural

# Relative error of traced tensor bytes, for a CPU. Traces are within 1 % of PyTorch's CPU allocator
# (tests/virtual/test_against_cpu.py), and extrapolations from small traces within 1 % of full-size ones.
_TENSOR_ERROR = 0.03


class PlannedPredictor(Predictor):
    """Predicts memory and rate from traces.

    Measured rates do not change predictions; the search learns from them per choice (:mod:`autotune.study.proposals`).
    Measured memory does not improve predictions: for 30 probes on two H100s after at least two others of the same model
    and rows (`benchmarks/gpu/results`), traced reserved memory was 1.5 % off in the mean, 1.8 % with the median factor
    or difference of the earlier probes, and 1.9 % with their errors per choice.

    After a probe has run out of memory, a common factor, :attr:`raised`, raises all predictions until that of this
    probe exceeds the limit, but not that of any probe that fitted. It only affects the ranking, and vetoes nothing.

    Args:
        trace_least: traces further candidates that may need the least memory, as long as its argument returns True;
            :meth:`least` calls it until it has finished once.
    """

    traces = True

    def __init__(self, evaluator: Evaluator, trace_least: Callable[[Callable[[], bool]], object]) -> None:
        self._evaluator = evaluator
        self._limit_bytes = evaluator.budget_bytes
        self._trace_least = trace_least
        self._traced_least = False
        self._trace_error = ""
        self._measured: dict[Candidate, Measurement] = {}
        self.raised = 1.0
        self._out_of_memory_count = 0

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Return the current prediction, without tracing."""
        estimate = self._evaluator.estimate(candidate)
        memory = estimate.memory
        if memory is None:
            return None
        on_cpu = memory.reserved_bytes is None
        need_bytes = max(1, round(self.raised * memory.device_bytes))
        if on_cpu:
            # A process's memory beyond its tensors varies, so it must not veto a candidate.
            error = 1 - (1 - _TENSOR_ERROR) * memory.peak_bytes / need_bytes
        else:
            traced_error = min(1.0, memory.error)
            error = traced_error + (1 - traced_error) * (1 - 1 / self.raised)
        measurement = self._measured.get(candidate)
        if measurement is not None and not measurement.ok:
            need_bytes = max(need_bytes, self._limit_bytes + 1)
        elif measurement is not None and on_cpu:
            # The probe fitted, so the limit is an upper bound; a measurement has no tighter one of mapped memory.
            need_bytes = min(need_bytes, self._limit_bytes)
        # A rate of 0 counts as no prediction.
        return Prediction(need_bytes, error, tokens_per_second=estimate.tokens_per_second or None)

    def trace(self, candidate: Candidate) -> Prediction | None:
        """Return the prediction from traces at the candidate's own sizes, or the current one if they fail."""
        if self._evaluator.estimate(candidate).origin is not Origin.TRACED:
            self._run_traces(lambda: self._evaluator.run([candidate]))
        return self.predict(candidate)

    def least(self, goes_on: Callable[[], bool] = lambda: True) -> Candidate | None:
        """Return the candidate with the smallest predicted need, traced at its own sizes; None if unknown."""
        if not self._traced_least and self._lightest() is not None and goes_on():
            self._run_traces(lambda: self._trace_least(goes_on))
            self._traced_least = goes_on()
        return self._lightest() if self._traced_least else None

    def _lightest(self) -> Candidate | None:
        # The common factor does not change the order.
        lightest = min(map(self._evaluator.estimate, self._evaluator.candidates), key=memory_key, default=None)
        return lightest.candidate if lightest is not None and lightest.memory is not None else None

    def traced(self) -> Sequence[Candidate]:
        """Return the legal candidates that were traced so far."""
        return self._evaluator.candidates

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Update the factor with a measurement; further traces recompute it."""
        if measurement.ok or measurement.status is ProbeStatus.OUT_OF_MEMORY:
            self._measured[candidate] = measurement
            self._update_raise()

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the factor and about a failure of the tracer."""
        notes = []
        if self.raised > 1:
            since = f"since {plural(self._out_of_memory_count, 'candidate')} ran out of memory"
            notes.append(f"Memory predictions were raised by {100 * (self.raised - 1):.3g} %, {since}.")
        if self._trace_error:
            notes.append(f"Some predictions are not traced: {self._trace_error}")
        return tuple(notes)

    def _run_traces(self, trace: Callable[[], object]) -> None:
        """Run traces, then recompute the factor; a failure becomes a note and does not end the search."""
        try:
            trace()
        except AutotuneError as error:
            self._trace_error = error.message
        finally:
            self._update_raise()

    def _update_raise(self) -> None:
        measured = [(self._evaluator.estimate(candidate).memory, probe) for candidate, probe in self._measured.items()]
        traced = [(memory.device_bytes, probe.ok) for memory, probe in measured if memory is not None]
        over_bytes = self._limit_bytes + 1
        required = max((over_bytes / size for size, fitted in traced if size and not fitted), default=1.0)
        allowed = min((over_bytes / size for size, fitted in traced if size and fitted), default=inf)
        self.raised = max(1.0, min(required, allowed))
        self._out_of_memory_count = sum(not fitted for _, fitted in traced)
