"""A predictor for the replayed table: exact, or wrong in a way that the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction, Predictor
from tests.study.replayed import TableProblem, peak_bytes, tokens_per_second


@cache
def legal() -> tuple[Candidate, ...]:
    """Return the table's legal candidates."""
    problem = TableProblem()
    return tuple(candidate for candidate in problem.everything() if problem.illegal(candidate) is None)


def everything(candidate: Candidate) -> bool:
    """Return that a candidate was traced."""
    return True


@dataclass
class Foretold(Predictor):
    """Predicts by the table.

    Attributes:
        error: share that is stated.
        is_traced: which candidates were traced from the start.
        speeds: whether speed is predicted.
        need: what is predicted for a candidate, in bytes.
        rate: what is predicted for a candidate, in tokens per second.
        traced_later: candidates that the search had traced.
        learned: what was shown of probes.
        traces: whether it traces candidates.
    """

    error: float = 0.1
    is_traced: Callable[[Candidate], bool] = everything
    speeds: bool = True
    need: Callable[[Candidate], int] = peak_bytes
    rate: Callable[[Candidate], float] = tokens_per_second
    traced_later: list[Candidate] = field(default_factory=list)
    learned: list[tuple[Candidate, Measurement]] = field(default_factory=list)
    traces: bool = True

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Predict what was traced."""
        if candidate not in self.traced_later and not self.is_traced(candidate):
            return None
        return Prediction(self.need(candidate), self.error, self.rate(candidate) if self.speeds else None)

    def trace(self, candidate: Candidate) -> Prediction | None:
        """Trace the candidate."""
        self.traced_later.append(candidate)
        return self.predict(candidate)

    def least(self, goes_on: Callable[[], bool] = lambda: True) -> Candidate | None:
        """Return the legal one that is predicted to need the least."""
        return min(legal(), key=self.need)

    def traced(self) -> Sequence[Candidate]:
        """Return the legal ones that were traced."""
        return [candidate for candidate in legal() if candidate in self.traced_later or self.is_traced(candidate)]

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Remember."""
        self.learned.append((candidate, measurement))
