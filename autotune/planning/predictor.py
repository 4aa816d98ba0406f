"""Predicts candidates from traced estimates, which every probe corrects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin, Runner
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError
from autotune.planning.calibration import Correction, Pair, correction, factor, raised
from autotune.units import format_bytes

T = TypeVar("T")

# Error of traced tensor bytes, as a share, where only tensors count. Traces are within 1 % of PyTorch's CPU allocator
# (tests/virtual/test_against_cpu.py), and extrapolations from small traces are within 1 % of full-size ones.
_TENSOR_ERROR = 0.03


class Estimates(Runner, Protocol):
    """The traced candidates of a search, and what traces others."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The legal candidates that were traced."""

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate in its normal form."""


class PlannedPredictor(Predictor):
    """Predicts memory and rate from traces.

    Example: after two probes that both took 1.5 times the predicted time, all predicted rates are divided by 1.5.

    A probe that ran out of memory shows that its candidate needs more than the limit, and raises all predictions until
    its own does; less where that would contradict a probe that fitted.

    On a CPU, probes that fit do not correct the memory of others. The limit there applies to the memory that a process
    maps, which is at least the traced tensors. A probe measures the memory that was touched, which is less than the
    tensors if some were zeroed and never written, and more if libraries keep memory of their own.

    Args:
        least: returns the candidate that needs the least memory, traced at its own sizes, or None without estimates.

    Attributes:
        memory, time: the current corrections.
    """

    traces = True

    def __init__(
        self, estimates: Estimates, least: Callable[[], Estimate | None], limit_bytes: int, device: DeviceKind
    ) -> None:
        self._estimates = estimates
        self._least = least
        self._limit_bytes = limit_bytes
        self._device = device
        self._problem = ""
        self._measured: dict[Candidate, Measurement] = {}
        self._predictions: dict[Candidate, Prediction | None] = {}
        self.memory = Correction()
        self.time = Correction()
        self._raised = 0

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

    def least(self) -> Candidate | None:
        """Return the candidate with the smallest predicted need, traced at its own sizes; None without predictions."""
        # Corrections keep the order of needs.
        found = self._tracing(self._least)
        return found.candidate if found is not None else None

    def traced(self) -> Sequence[Candidate]:
        """Return the legal candidates that were traced so far."""
        return self._estimates.candidates

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Update the corrections with a measurement; they are recomputed when its estimate changes."""
        if measurement.ok or measurement.status is ProbeStatus.OUT_OF_MEMORY:
            self._measured[candidate] = measurement
            self._correct()

    def notes(self) -> tuple[str, ...]:
        """Return the corrections, and why tracing ended early if it did, in sentences."""
        words = []
        if self._raised:
            by = self.memory.factor * self.memory.raised
            words.append(f"by x{by:.2f} in memory, since {self._raised} ran out of it,")
        elif self.memory.offset:
            words.append(
                f"by {'+' if self.memory.offset > 0 else '-'}{format_bytes(abs(self.memory.offset))} in memory"
            )
        elif self.memory.factor != 1.0:
            words.append(f"by x{self.memory.factor:.2f} in memory")
        factor = f"x{self.time.factor:.2g}"
        if factor != "x1":
            words.append(f"by {factor} in time")
        probes = max(self.memory.probes + self._raised, self.time.probes)
        corrected = (f"Predictions were corrected {' and '.join(words)} after {probes} probes.",) if words else ()
        return (*corrected, f"Some predictions are not traced: {self._problem}") if self._problem else corrected

    def _tracing(self, trace: Callable[[], T]) -> T | None:
        """Return what runs traces, and correct what follows from them; None where they fail, which ends no search."""
        try:
            return trace()
        except AutotuneError as error:
            self._problem = error.message
            return None
        finally:
            self._correct()

    def _predict(self, estimate: Estimate) -> Prediction | None:
        memory, rate = estimate.memory, _rate(estimate)
        if memory is None:
            return None
        on_cpu = self._device == "cpu"
        need_bytes = max(1, round(self.memory(memory.device_bytes)))
        if on_cpu:
            # What a process holds in addition to its tensors is not the same for all, and rules nothing out.
            error = 1 - (1 - _TENSOR_ERROR) * memory.peak_bytes / need_bytes
        else:
            stated = 0.0 if self.memory.probes else memory.error
            error = self.memory.error_after(max(self.memory.error, stated))
        shown = self._measured.get(estimate.candidate)
        if shown is not None and not shown.ok:
            need_bytes = max(need_bytes, self._limit_bytes + 1)
        elif shown is not None and on_cpu:
            # The limit held, and nothing else of the measurement says how much was mapped.
            need_bytes = min(need_bytes, self._limit_bytes)
        return Prediction(
            need_bytes=need_bytes,
            error=error,
            tokens_per_second=rate / self.time.factor if rate else None,
            partly_measured=on_cpu,
        )

    def _correct(self) -> None:
        every = [(self._estimates.estimate(candidate), shown) for candidate, shown in self._measured.items()]
        rates = [(_rate(estimate), shown.tokens_per_second) for estimate, shown in every]
        self.time = factor([Pair(1 / expected, 1 / measured) for expected, measured in rates if expected and measured])
        traced = [(item.memory, shown) for item, shown in every if item.memory]
        found = Correction()
        if self._device != "cpu":
            fitted = [(memory, shown) for memory, shown in traced if shown.ok]
            stated = max((memory.error for memory, _ in fitted), default=0.0)
            needs = [(memory.device_bytes, _need_bytes(memory, shown)) for memory, shown in fitted]
            found = correction([Pair(predicted, need) for predicted, need in needs if need], stated)
        ran_out = [memory.device_bytes for memory, shown in traced if not shown.ok]
        within = [memory.device_bytes for memory, shown in traced if shown.ok]
        self.memory = raised(found, ran_out, within, self._limit_bytes + 1)
        self._raised = len(ran_out) if self.memory.raised > 1 else 0
        self._predictions.clear()


def _rate(estimate: Estimate) -> float | None:
    """Return the predicted rate; one of 0 counts as no prediction."""
    return estimate.tokens_per_second or None


def _need_bytes(memory: MemoryEstimate, shown: Measurement) -> int | None:
    """Return the device memory that a probe held; the context is taken as predicted if the driver reports less."""
    if shown.reserved_bytes is None:
        return None
    return max(shown.reserved_bytes + memory.context_bytes, shown.device_bytes or 0)
