"""What a search may be told about a candidate before it is probed; it does not know where that comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement
from autotune.units import format_bytes, format_share


@dataclass(frozen=True)
class Prediction:
    """What a candidate should need and reach.

    Attributes:
        need_bytes: of the memory that the limit is about.
        error: share by which that may be off, either way.
        certain: whether it stands on this very combination of choices. Others order candidates and decide nothing.
        tokens_per_second: for ranking; None where speed cannot be predicted.
        least: whether it needs that at least, and a probe that fits measures only a part of it.
    """

    need_bytes: int
    error: float
    certain: bool
    tokens_per_second: float | None = None
    least: bool = False

    def over(self, limit_bytes: int) -> bool:
        """Whether it is more than a limit by more than it may be off."""
        return self.need_bytes * (1 - self.error) > limit_bytes

    def said(self, limit_bytes: int) -> str:
        """Return it beside the limit, in words."""
        need = f"{'at least ' if self.least else ''}{format_bytes(self.need_bytes)}"
        return f"predicted to need {need} of the {format_bytes(limit_bytes)}, within {format_share(self.error)}"


class Predictor(Protocol):
    """Predicts candidates of one problem, all in their normal form."""

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Return what is known by now, at no cost; None where nothing is."""

    def make_sure(self, candidate: Candidate) -> Prediction | None:
        """Return a prediction that is certain where that costs less than a probe, else what is known."""

    def promising(self, count: int) -> Sequence[Candidate]:
        """Return so many legal candidates that should fit, the fastest first; none where speed is not predicted."""

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Take in what a probe showed; called once for each, in their order, those of earlier runs included."""


class NoPredictor:
    """Predicts nothing."""

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Return None."""
        return None

    def make_sure(self, candidate: Candidate) -> Prediction | None:
        """Return None."""
        return None

    def promising(self, count: int) -> Sequence[Candidate]:
        """Return none."""
        return ()

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Forget it."""
