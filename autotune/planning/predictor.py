"""Predicts candidates from traced estimates, and corrects the memory by what probes measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin, Runner, need
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError
from autotune.units import counted, format_bytes

# Error of traced tensor bytes, as a share, where only tensors count. Traces are within 1 % of PyTorch's CPU allocator
# (tests/virtual/test_against_cpu.py), and extrapolations from small traces are within 1 % of full-size ones.
_TENSOR_ERROR = 0.03

FEWEST = 2
"""Fewest probes from which a correction is computed: a single one may be off by chance."""

ENOUGH = 5
"""Fewest probes from which a smaller error than before is stated: the largest of a few misses says little about the
next one."""

SMALLEST_ERROR = 0.05
"""The smallest error that is stated, as a share, however well the probes agree."""


Pair = tuple[float, float]
"""A predicted figure and its measured value, in the same unit; both are above 0."""


@dataclass(frozen=True)
class Correction:
    """A correction of estimates: a factor or an offset, and what everything is raised by after it.

    Example: if probes measured 11 GiB where 10 GiB were predicted, and 22 GiB where 20 GiB were, the factor is 1.1.

    Attributes:
        error: share by which a corrected figure may be off, the raise apart.
        probes: number of probes that factor or offset is derived from; 0 where there were too few.
        raised: factor by which figures were raised since candidates ran out of memory; 1 where none did.
    """

    factor: float = 1.0
    offset: float = 0.0
    error: float = 0.0
    probes: int = 0
    raised: float = 1.0

    def __call__(self, predicted: float) -> float:
        """Return the corrected figure."""
        return max(0.0, self.factor * predicted + self.offset) * self.raised

    def error_after(self, error: float) -> float:
        """Return the error of a figure that was off by up to ``error`` before the raise.

        It grows by as much as the figure does, so that nothing is ruled out by the raise.
        """
        before = min(1.0, error)
        return before + (1 - before) * (1 - 1 / self.raised)


def correction(pairs: Sequence[Pair], stated_error: float) -> Correction:
    """Return the median factor or the median difference, whichever leaves the smaller misses.

    Medians are used because one probe that shared its device with another process must not move all estimates.

    Args:
        stated_error: share by which estimates may be off without a correction.
    """
    if len(pairs) < FEWEST:
        return Correction(error=stated_error)
    found = (
        Correction(offset=median(measured - predicted for predicted, measured in pairs)),
        Correction(factor=median(measured / predicted for predicted, measured in pairs)),
    )
    best = min(found, key=lambda item: (median(_misses(item, pairs)), max(_misses(item, pairs))))
    floor = SMALLEST_ERROR if len(pairs) >= ENOUGH else max(SMALLEST_ERROR, stated_error)
    return Correction(best.factor, best.offset, max(floor, *_misses(best, pairs)), len(pairs))


def raised(found: Correction, ran_out: Sequence[float], fitted: Sequence[float], limit: float) -> Correction:
    """Return a correction that is scaled up until every candidate that ran out of memory is predicted above the limit,
    but not so far that one that fitted is.

    Args:
        ran_out, fitted: predicted figures, not corrected.
    """
    wanted = max((limit / found(predicted) for predicted in ran_out if found(predicted)), default=1.0)
    allowed = min((limit / found(predicted) for predicted in fitted if found(predicted)), default=inf)
    return replace(found, raised=max(1.0, min(wanted, allowed)))


def _misses(found: Correction, pairs: Sequence[Pair]) -> list[float]:
    """Return each probe's relative difference from its corrected prediction."""
    return [abs(measured / max(1.0, found(predicted)) - 1) for predicted, measured in pairs]


class Estimates(Runner, Protocol):
    """The traced candidates of a search, and their tracer."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The legal candidates that were traced."""

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate in its normal form."""


class PlannedPredictor(Predictor):
    """Predicts memory and rate from traces.

    Rates are those of the traces: what probes teach of them is learnt by choice, by the search
    (:mod:`autotune.study.surrogate`), which a common factor would not change.

    A probe that ran out of memory shows that its candidate needs more than the limit, and raises all predictions until
    its own does; less where that would contradict a probe that fitted.

    On a CPU, probes that fit do not correct the memory of others. The limit there applies to the memory that a process
    maps, which is at least the traced tensors. A probe measures the memory that was touched, which is less than the
    tensors if some were zeroed and never written, and more if libraries keep memory of their own.

    Args:
        trace_least: traces further candidates that may need the least memory, while its argument returns True; called
            when that is asked for, until it has come to its end.

    Attributes:
        memory: its current correction.
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
        self.memory = Correction()
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

    def least(self, goes_on: Callable[[], bool] = lambda: True) -> Candidate | None:
        """Return the candidate with the smallest predicted need, traced at its own sizes; None if it is not known."""
        if not self._traced_least and self._lightest() is not None and goes_on():
            self._tracing(lambda: self._trace_least(goes_on))
            self._traced_least = goes_on()
        return self._lightest() if self._traced_least else None

    def _lightest(self) -> Candidate | None:
        # Corrections keep the order of needs.
        found = min(map(self._estimates.estimate, self._estimates.candidates), key=need, default=None)
        return found.candidate if found is not None and found.memory is not None else None

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
        memory, words = self.memory, []
        if memory.offset:
            words.append(f"corrected by {'+' if memory.offset > 0 else '-'}{format_bytes(abs(memory.offset))}")
        elif memory.factor != 1.0:
            words.append(f"corrected by x{memory.factor:.2f}")
        since = ""
        if self._raised:
            words.append(f"raised by {100 * (memory.raised - 1):.3g} %")
            since = f", since {counted(self._raised, 'candidate')} ran out of memory"
        probes = counted(memory.probes + self._raised, "probe")
        corrected = (f"Memory predictions were {' and '.join(words)}{since} ({probes}).",) if words else ()
        return (*corrected, f"Some predictions are not traced: {self._problem}") if self._problem else corrected

    def _tracing(self, trace: Callable[[], object]) -> None:
        """Run traces, and correct what follows from them; a failure ends no search."""
        try:
            trace()
        except AutotuneError as error:
            self._problem = error.message
        finally:
            self._correct()

    def _predict(self, estimate: Estimate) -> Prediction | None:
        memory = estimate.memory
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
            # A rate of 0 counts as no prediction.
            tokens_per_second=estimate.tokens_per_second or None,
            partly_measured=on_cpu,
        )

    def _correct(self) -> None:
        every = [(self._estimates.estimate(candidate), shown) for candidate, shown in self._measured.items()]
        traced = [(item.memory, shown) for item, shown in every if item.memory]
        found = Correction()
        if self._device != "cpu":
            fitted = [(memory, shown) for memory, shown in traced if shown.ok]
            stated = max((memory.error for memory, _ in fitted), default=0.0)
            needs = [(memory.device_bytes, _need_bytes(memory, shown)) for memory, shown in fitted]
            found = correction([(predicted, held) for predicted, held in needs if held], stated)
        ran_out = [memory.device_bytes for memory, shown in traced if not shown.ok]
        within = [memory.device_bytes for memory, shown in traced if shown.ok]
        self.memory = raised(found, ran_out, within, self._limit_bytes + 1)
        self._raised = len(ran_out) if self.memory.raised > 1 else 0
        self._predictions.clear()


def _need_bytes(memory: MemoryEstimate, shown: Measurement) -> int | None:
    """Return the device memory that a probe held; the context is taken as predicted if the driver reports less."""
    if shown.reserved_bytes is None:
        return None
    return max(shown.reserved_bytes + memory.context_bytes, shown.device_bytes or 0)
