"""The interface between a search and its predictions: :class:`Predictor` and :class:`Prediction`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement
from autotune.units import format_bytes, format_share


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and rate of a candidate, traced at its own sizes.

    Attributes:
        need_bytes: predicted need of the limited memory.
        error: share by which the need may be off, either way.
        tokens_per_second: predicted rate, for ranking; None if speed cannot be predicted.
    """

    need_bytes: int
    error: float
    tokens_per_second: float | None = None

    def over(self, limit_bytes: int) -> bool:
        """Whether the need exceeds a limit by more than the error."""
        return self.need_bytes * (1 - self.error) > limit_bytes

    def reason(self, limit_bytes: int) -> str:
        """Return the need and the limit."""
        need = format_bytes(self.need_bytes)
        return f"predicted to need {need} of the {format_bytes(limit_bytes)}, ±{format_share(self.error)}"


class Predictor:
    """Predicts candidates of one problem, in their normal form. This base class predicts nothing.

    The search calls :meth:`predict`, :meth:`traced` and :meth:`least` at any time, :meth:`trace` right before
    every probe, and :meth:`learn` after each probe and each later run that ran out of memory.

    Attributes:
        traces: whether :meth:`trace` may predict what :meth:`predict` does not.
    """

    traces: bool = False

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Return the current prediction, without tracing; None if there is none."""
        return None

    def trace(self, candidate: Candidate) -> Prediction | None:
        """Trace the candidate unless it was traced, and return its prediction; None if traces fail."""
        return None

    def least(self, goes_on: Callable[[], bool] = lambda: True) -> Candidate | None:
        """Return the legal candidate of the space with the smallest predicted need, traced at its own sizes.

        None without predictions, or if there was no time to trace it.

        Args:
            goes_on: returns whether there is time for further traces.
        """
        return None

    def traced(self) -> Sequence[Candidate]:
        """Return the legal candidates traced so far."""
        return ()

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Correct the predictions by a measurement; called once for each run in order, earlier searches included."""
