"""Adapts the planner's estimates to the study's `Predictor` protocol, corrected by every probe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.errors import AutotuneError
from autotune.planning.calibration import Correction, Pair, correction, factor
from autotune.units import format_bytes

# Share of the candidates whose speed has to be predicted for the fastest of them to be proposed.
_ENOUGH = 0.5

# Error of traced tensor bytes, as a share, where only tensors count. Traces are within 1 % of PyTorch's CPU allocator
# (tests/virtual/test_against_cpu.py), and extrapolations from small traces are within 1 % of full-size ones.
_TENSOR_ERROR = 0.03


class Estimates(Protocol):
    """The part of :class:`~autotune.planning.planner.Planner` that is needed here."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The legal candidates."""

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate in its normal form."""

    def trace(self, candidates: Iterable[Candidate]) -> None:
        """Trace the technique combinations of candidates."""


class PlannedPredictor:
    """Predicts memory and rate from traces; implements :class:`autotune.core.prediction.Predictor`.

    Example: after two probes that both took 1.5 times the predicted time, all predicted rates are divided by 1.5.

    On a CPU, memory is not corrected. The limit there applies to the memory that a process maps, which is at least the
    traced tensors. A probe measures the memory that was touched, which is less than the tensors if some were zeroed and
    never written, and more if libraries keep memory of their own.

    Args:
        trace_seconds: time limit for tracing during the search.

    Attributes:
        memory, time: the current corrections.
    """

    def __init__(self, estimates: Estimates, limit_bytes: int, device: DeviceKind, trace_seconds: float) -> None:
        self._estimates = estimates
        self._limit_bytes = limit_bytes
        self._device = device
        self._seconds_left = trace_seconds
        self._problem = ""
        self._measured: dict[Candidate, Measurement] = {}
        self._predictions: dict[Candidate, Prediction | None] = {}
        self._ranked: list[Candidate] | None = None
        self.memory = Correction()
        self.time = Correction()

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Return the current prediction, without tracing."""
        if candidate not in self._predictions:
            self._predictions[candidate] = self._predict(self._estimates.estimate(candidate))
        return self._predictions[candidate]

    def make_sure(self, candidate: Candidate) -> Prediction | None:
        """Trace the candidate's technique combination if there is time left, and return the prediction."""
        if self._seconds_left > 0:
            self._trace(candidate)
            self._ranked = None
            self._correct()
        return self.predict(candidate)

    def least(self) -> Candidate | None:
        """Return the candidate with the smallest predicted need, traced if there is time left; None without any."""
        while True:
            known = [
                (item.need_bytes, item.certain, each)
                for each in self._estimates.candidates
                if (item := self.predict(each))
            ]
            if not known:
                return None
            _, certain, smallest = min(known, key=lambda found: found[0])
            if certain or (found := self.make_sure(smallest)) is None or not found.certain:
                return smallest

    def promising(self, count: int) -> Sequence[Candidate]:
        """Return the fastest candidates that should fit; none if the speed of most candidates is not predicted."""
        if self._ranked is None:
            rates = {candidate: _rate(self._estimates.estimate(candidate)) for candidate in self._estimates.candidates}
            known = {candidate: rate for candidate, rate in rates.items() if rate is not None}
            enough = len(known) >= _ENOUGH * len(rates)
            self._ranked = sorted(known, key=known.__getitem__, reverse=True) if enough else []
        found: list[Candidate] = []
        for candidate in self._ranked:
            prediction = self.predict(candidate)
            if len(found) == count:
                break
            if prediction is not None and prediction.need_bytes <= self._limit_bytes:
                found.append(candidate)
        return found

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Update the corrections with a measurement; they are recomputed when its estimate changes."""
        if measurement.ok:
            self._measured[candidate] = measurement
            self._correct()

    def notes(self) -> tuple[str, ...]:
        """Return the corrections, and why tracing ended early if it did, in sentences."""
        words = []
        if self.memory.offset:
            words.append(
                f"by {'+' if self.memory.offset > 0 else '-'}{format_bytes(abs(self.memory.offset))} in memory"
            )
        elif self.memory.factor != 1.0:
            words.append(f"by x{self.memory.factor:.2f} in memory")
        if self.time.probes:
            words.append(f"by x{self.time.factor:.2g} in time")
        probes = max(self.memory.probes, self.time.probes)
        corrected = (f"Predictions were corrected {' and '.join(words)} after {probes} probes.",) if words else ()
        return (*corrected, f"Tracing ended early: {self._problem}") if self._problem else corrected

    def _trace(self, candidate: Candidate) -> None:
        started = time.monotonic()
        try:
            self._estimates.trace([candidate])
            self._seconds_left -= time.monotonic() - started
        except AutotuneError as error:
            # The search continues without further traces.
            self._seconds_left, self._problem = 0.0, error.message

    def _predict(self, estimate: Estimate) -> Prediction | None:
        memory, rate = estimate.memory, _rate(estimate)
        if memory is None:
            return None
        traced, on_cpu = estimate.origin is Origin.TRACED, self._device == "cpu"
        error = max(self.memory.error, memory.error)
        if traced:
            error = _TENSOR_ERROR if on_cpu else self.memory.error if self.memory.probes else error
        return Prediction(
            need_bytes=max(1, round(self.memory(memory.device_bytes))),
            error=error,
            certain=traced,
            tokens_per_second=rate / self.time.factor if rate else None,
            least=on_cpu,
        )

    def _correct(self) -> None:
        estimates = [(self._estimates.estimate(candidate), shown) for candidate, shown in self._measured.items()]
        rates = [(_rate(estimate), shown.tokens_per_second) for estimate, shown in estimates]
        self.time = factor([Pair(1 / expected, 1 / measured) for expected, measured in rates if expected and measured])
        if self._device != "cpu":
            traced = [(item.memory, shown) for item, shown in estimates if item.memory and item.origin is Origin.TRACED]
            stated = max((memory.error for memory, _ in traced), default=0.0)
            needs = [(memory.device_bytes, _need_bytes(memory, shown)) for memory, shown in traced]
            self.memory = correction([Pair(predicted, need) for predicted, need in needs if need], stated)
        self._predictions.clear()


def _rate(estimate: Estimate) -> float | None:
    """Return the predicted rate; composed figures can come out at 0 or below, which counts as no prediction."""
    rate = estimate.tokens_per_second
    return rate if rate is not None and rate > 0 else None


def _need_bytes(memory: MemoryEstimate, shown: Measurement) -> int | None:
    """Return the device memory that a probe held; the context is taken as predicted if the driver reports less."""
    if shown.reserved_bytes is None:
        return None
    return max(shown.reserved_bytes + memory.context_bytes, shown.device_bytes or 0)
