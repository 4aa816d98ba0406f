"""Gaussian processes over candidates' choices, which predict figures of candidates."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.core.candidate import Candidate, Choice

Array = NDArray[np.float64]
Rows = NDArray[np.int16]


@dataclass(frozen=True)
class Variance:
    """Prior variances of a log figure: per choice (with 0.1, one typically changes it by a third, up or down), of the
    combination of all choices, and of observation noise."""

    choice: float
    combination: float
    noise: float


MEASURED_VARIANCE = Variance(choice=0.1, combination=0.02, noise=0.01)
"""Prior of measured figures without predictions, and of outcomes, 1 if a candidate ran, else 0: if a failed candidate
differs from one that ran in a single choice, this choice probably fails."""

TRACED_VARIANCE = Variance(choice=0.1, combination=0.02, noise=1e-4)
"""Prior of predicted figures; traces have almost no noise."""

ERROR_VARIANCES = tuple(
    Variance(choice, combination, noise=0.005)
    for choice, combination in ((0.05, 0.02), (0.01, 0.02), (0.002, 0.02), (0.0005, 0.003))
)
"""Priors of the ratio of a measured figure to the predicted one, from low to high trust in predictions. Errors
correlate: operators of one kind are off together. With the last, which is for predictions that are off by a few
percent, replayed searches end two or three probes sooner, as near to the best rate.

A priori, each is e times less likely than the previous one. The likelihood of 66 probes on GPUs
(`benchmarks/gpu/results`) is highest with 0.0005 to 0.002 per choice, as is that of two of three tables recorded on
CPUs (`benchmarks/replay`)."""

MIN_CHANCE = 0.25
"""Probability to run below which a candidate is not traced, or is ranked last. With 0.1 to 0.5, searches of
`tests/study/test_improvement.py` with a choice that cannot be traced waste 4 to 10 traces on it; without, 20 to 47."""

_LENGTH = 2.0
"""Length scale of a combination's correlation: the number of differing choices at which it is 1/e."""


@dataclass(frozen=True)
class Posterior:
    """Posterior means of log figures, and their standard deviations for lack of a trace and of a probe."""

    mean: Array
    untraced: Array
    unmeasured: Array


class Codes:
    """Encodes candidates as rows of integers, one per knob."""

    def __init__(self, knobs: Collection[str]) -> None:
        self._numbers: Mapping[str, dict[Choice | None, int]] = {knob: {} for knob in knobs}
        self._rows: dict[Candidate, tuple[int, ...]] = {}

    def __call__(self, candidates: Iterable[Candidate]) -> Rows:
        """Return a row for each candidate."""
        rows = [self._row(candidate) for candidate in candidates]
        return np.asarray(rows, np.int16).reshape(len(rows), len(self._numbers))

    def _row(self, candidate: Candidate) -> tuple[int, ...]:
        if candidate not in self._rows:
            each = self._numbers.items()
            self._rows[candidate] = tuple([codes.setdefault(candidate.get(knob), len(codes)) for knob, codes in each])
        return self._rows[candidate]


class FigureModel:
    """Model of one figure of all candidates, in logarithms: a process of predictions, and one of their errors."""

    def __init__(self, codes: Codes, predicted: Mapping[Candidate, float], measured: Mapping[Candidate, float]) -> None:
        self.predicted, self._measured, self._codes = predicted, measured, codes
        self._traced = Process(codes(predicted), np.asarray(list(predicted.values())), TRACED_VARIANCE)
        guesses, _ = self._predicted_means(list(measured))
        rows, errors = codes(measured), np.asarray(list(measured.values())) - guesses
        levels = [Process(rows, errors, each) for each in (ERROR_VARIANCES if predicted else (MEASURED_VARIANCE,))]
        self._errors = levels[int(np.argmax([found.log_likelihood - trust for trust, found in enumerate(levels)]))]

    def __call__(self, candidates: Sequence[Candidate]) -> Posterior:
        """Return posterior means and standard deviations for candidates."""
        guesses, untraced = self._predicted_means(candidates)
        errors, unmeasured = self._errors(self._codes(candidates))
        return Posterior(guesses + errors, untraced, unmeasured)

    def with_assumed_trace(self, candidate: Candidate) -> FigureModel:
        """Return the figure as if a trace of the candidate had returned its posterior mean."""
        guess, _ = self._predicted_means([candidate])
        return FigureModel(self._codes, {**self.predicted, candidate: float(guess[0])}, self._measured)

    def _predicted_means(self, candidates: Sequence[Candidate]) -> tuple[Array, Array]:
        """Return log predictions, the posterior means for untraced candidates, and their standard deviations."""
        if not self.predicted:
            return np.zeros(len(candidates)), np.zeros(len(candidates))
        mean, deviation = self._traced(self._codes(candidates))
        known = np.asarray([candidate in self.predicted for candidate in candidates], bool)
        exact = np.asarray([self.predicted.get(candidate, 0.0) for candidate in candidates])
        return np.where(known, exact, mean), np.where(known, 0.0, deviation)


class Process:
    """A Gaussian process (Rasmussen and Williams 2006, algorithm 2.1).

    Its kernel is a sum of two terms: one proportional to the number of shared choices, and one for the combination that
    decays exponentially with the number of differing choices. Without a prior mean, it is the mean of the values.

    Attributes:
        log_likelihood: of the values with an unknown common mean (their section 2.7), up to a constant.
    """

    def __init__(self, rows: Rows, values: Array, variance: Variance, mean: float | None = None) -> None:
        self._rows, self._variance = rows, variance
        self._mean = mean if mean is not None else float(values.mean()) if len(values) else 0.0
        self._inverse = np.linalg.inv(self._kernel(rows) + variance.noise * np.eye(len(rows)))
        off = values - self._mean
        self._weights = self._inverse @ off
        common = float(self._inverse.sum()) or 1.0
        squares = off @ self._weights - self._weights.sum() ** 2 / common
        self.log_likelihood = float(np.linalg.slogdet(self._inverse)[1] - np.log(common) - squares) / 2

    def __call__(self, rows: Rows) -> tuple[Array, Array]:
        """Return posterior means and standard deviations."""
        near = self._kernel(rows)
        own = self._variance.choice * rows.shape[1] + self._variance.combination
        variance = own - np.einsum("ij,ij->i", near @ self._inverse, near)
        return self._mean + near @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _kernel(self, rows: Rows) -> Array:
        shared = np.zeros((len(rows), len(self._rows)), np.int16)
        for own, other in zip(rows.T, self._rows.T, strict=True):
            shared += own[:, None] == other
        differing = rows.shape[1] - shared
        return np.asarray(self._variance.choice * shared + self._variance.combination * np.exp(-differing / _LENGTH))


def chances(codes: Codes, ran: Mapping[Candidate, bool], candidates: Sequence[Candidate]) -> Array:
    """Return the probabilities that candidates run, by whether each tried one ran."""
    outcomes = Process(codes(ran), np.asarray(list(ran.values()), float), MEASURED_VARIANCE, mean=1.0)
    return np.clip(outcomes(codes(candidates))[0], 0.0, 1.0)


def normal_cdf(values: Array, deviations: Array) -> Array:
    """Return the probability that each zero-mean normal variable is below its value."""
    scaled = values / np.maximum(deviations, 1e-9)
    return np.asarray([(1 + math.erf(each / math.sqrt(2))) / 2 for each in scaled])


def expected_improvement(ahead: Array, deviations: Array) -> Array:
    """Return the expected improvement of log-normal figures over the best one, as a share of the best.

    Jones, Schonlau and Welch 1998, "Efficient Global Optimization of Expensive Black-Box Functions"; they end at 1 %.
    ``ahead`` are means of the logarithms, minus the logarithm of the best figure.
    """
    faster = np.exp(ahead + deviations**2 / 2) * normal_cdf(ahead + deviations**2, deviations)
    return np.asarray(faster - normal_cdf(ahead, deviations))
