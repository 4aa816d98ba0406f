"""Predicts candidates from traced estimates, and raises predicted memory after probes ran out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, Origin, Runner, need
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError
from autotune.units import counted

# Error of traced tensor bytes, as a share, where only tensors count. Traces are within 1 % of PyTorch's CPU allocator
# (tests/virtual/test_against_cpu.py), and extrapolations from small traces are within 1 % of full-size ones.
_TENSOR_ERROR = 0.03


class Estimates(Runner, Protocol):
    """The traced candidates of a search, and their tracer."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The legal candidates that were traced."""

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate in its normal form."""


class PlannedPredictor(Predictor):
    """Predicts memory and rate from traces.

    Measured rates do not change predictions; the search learns from them per choice (:mod:`autotune.study.surrogate`).
    Measured memory does not improve predictions: for 30 probes on two H100s after at least two others of the same model
    and rows (`benchmarks/gpu/results`), traced reserved memory was 1.5 % off in the mean, 1.8 % with the median factor
    or difference of the earlier probes, and 1.9 % with their errors per choice.

    A probe that ran out of memory shows that its candidate needs more than the limit. All predictions are raised by a
    common factor until its own exceeds the limit, but not so far that a probe that fitted would. The raise only affects
    the ranking, and vetoes no candidate.

    Args:
        trace_least: traces further candidates that may need the least memory while its argument returns True; called
            by :meth:`least` until it has finished once.

    Attributes:
        raised: factor by which memory predictions are raised; 1 if no candidate ran out of memory.
    """

    traces = True

    def __init__(
        self,
        estimates: Estimates,
        trace_least: Callable[[Callable[[], bool]], object],
        limit_bytes: int,
        device: DeviceKind,
    ) -> None:
        self._estimates = estimates
        self._trace_least = trace_least
        self._traced_least = False
        self._limit_bytes = limit_bytes
        self._device = device
        self._problem = ""
        self._measured: dict[Candidate, Measurement] = {}
        self._predictions: dict[Candidate, Prediction | None] = {}
        self.raised = 1.0
        self._ran_out = 0

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Return the current prediction, without tracing."""
        if candidate not in self._predictions:
            self._predictions[candidate] = self._predict(self._estimates.estimate(candidate))
        return self._predictions[candidate]

    def trace(self, candidate: Candidate) -> Prediction | None:
        """Return the prediction from traces at the candidate's own sizes, or the current one if they fail."""
        if self._estimates.estimate(candidate).origin is not Origin.TRACED:
            self._tracing(lambda: self._estimates.run([candidate]))
        return self.predict(candidate)

    def least(self, goes_on: Callable[[], bool] = lambda: True) -> Candidate | None:
        """Return the candidate with the smallest predicted need, traced at its own sizes; None if unknown."""
        if not self._traced_least and self._lightest() is not None and goes_on():
            self._tracing(lambda: self._trace_least(goes_on))
            self._traced_least = goes_on()
        return self._lightest() if self._traced_least else None

    def _lightest(self) -> Candidate | None:
        # A raise keeps the order of needs.
        found = min(map(self._estimates.estimate, self._estimates.candidates), key=need, default=None)
        return found.candidate if found is not None and found.memory is not None else None

    def traced(self) -> Sequence[Candidate]:
        """Return the legal candidates that were traced so far."""
        return self._estimates.candidates

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Update the raise with a measurement; it is recomputed after further traces."""
        if measurement.ok or measurement.status is ProbeStatus.OUT_OF_MEMORY:
            self._measured[candidate] = measurement
            self._raise()

    def notes(self) -> tuple[str, ...]:
        """Return the raise, and why tracing ended early if it did, in sentences."""
        notes = []
        if self.raised > 1:
            since = f"since {counted(self._ran_out, 'candidate')} ran out of memory"
            notes.append(f"Memory predictions were raised by {100 * (self.raised - 1):.3g} %, {since}.")
        if self._problem:
            notes.append(f"Some predictions are not traced: {self._problem}")
        return tuple(notes)

    def _tracing(self, trace: Callable[[], object]) -> None:
        """Run traces, then recompute the raise; a failure is noted and does not end the search."""
        try:
            trace()
        except AutotuneError as error:
            self._problem = error.message
        finally:
            self._raise()

    def _predict(self, estimate: Estimate) -> Prediction | None:
        memory = estimate.memory
        if memory is None:
            return None
        on_cpu = self._device == "cpu"
        need_bytes = max(1, round(self.raised * memory.device_bytes))
        if on_cpu:
            # A process's memory beyond its tensors varies, so it must not veto a candidate.
            error = 1 - (1 - _TENSOR_ERROR) * memory.peak_bytes / need_bytes
        else:
            stated = min(1.0, memory.error)
            error = stated + (1 - stated) * (1 - 1 / self.raised)
        shown = self._measured.get(estimate.candidate)
        if shown is not None and not shown.ok:
            need_bytes = max(need_bytes, self._limit_bytes + 1)
        elif shown is not None and on_cpu:
            # The probe fitted the limit; the measurement contains no closer bound of mapped memory.
            need_bytes = min(need_bytes, self._limit_bytes)
        return Prediction(
            need_bytes=need_bytes,
            error=error,
            # A rate of 0 counts as no prediction.
            tokens_per_second=estimate.tokens_per_second or None,
        )

    def _raise(self) -> None:
        every = [(self._estimates.estimate(candidate).memory, shown) for candidate, shown in self._measured.items()]
        traced = [(memory.device_bytes, shown.ok) for memory, shown in every if memory is not None]
        over_bytes = self._limit_bytes + 1
        wanted = max((over_bytes / size for size, fitted in traced if size and not fitted), default=1.0)
        allowed = min((over_bytes / size for size, fitted in traced if size and fitted), default=inf)
        self.raised = max(1.0, min(wanted, allowed))
        self._ran_out = sum(not fitted for _, fitted in traced)
        self._predictions.clear()
