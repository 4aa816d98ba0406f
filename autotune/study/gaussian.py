"""Gaussian processes over the choices of candidates: what to expect of one, and how well that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.core.candidate import Candidate, Choice

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Variance:
    """Variances of a logarithm: by each choice, by the combination of all choices, and of a single observation.

    A variance by choice of 0.1 expects that one choice changes the figure by a third, up or down.
    """

    choice: float
    combination: float
    noise: float


OF_CANDIDATES = Variance(choice=0.1, combination=0.02, noise=0.01)
"""Of a figure without a prediction."""

OF_TRACES = Variance(choice=0.1, combination=0.02, noise=1e-4)
"""Of a predicted figure; a trace has hardly any noise."""

OF_ERRORS = Variance(choice=0.05, combination=0.02, noise=0.005)
"""Of the ratio of a measured figure to the predicted one: operators of one kind are off together."""

_REACH = 2.0
"""Differing choices over which the correlation of a combination falls to 1/e."""


@dataclass(frozen=True)
class Expected:
    """Expected logarithms of some candidates, and their standard deviations for lack of a trace and of a probe."""

    mean: Array
    untraced: Array
    unmeasured: Array


class Figure:
    """One figure of all candidates.

    Args:
        predicted: logarithms of predicted figures.
        measured: logarithms of measured figures.
    """

    def __init__(
        self,
        choices: Mapping[str, Sequence[Choice]],
        predicted: Mapping[Candidate, float],
        measured: Mapping[Candidate, float],
    ) -> None:
        self.predicted = predicted
        named = [(knob, choice) for knob, each in choices.items() for choice in each]
        # A normal form may have a choice that is none of the space's.
        normal = [item for candidate in (*predicted, *measured) for item in candidate.items() if item[0] in choices]
        self._columns = {item: index for index, item in enumerate(dict.fromkeys((*named, *normal)))}
        self._knobs = len(choices)
        self._traced = Process(self._rows(predicted), np.asarray(list(predicted.values())), OF_TRACES, self._knobs)
        guesses, _ = self._guess(list(measured))
        variance = OF_ERRORS if predicted else OF_CANDIDATES
        self._errors = Process(
            self._rows(measured), np.asarray(list(measured.values())) - guesses, variance, self._knobs
        )

    def __call__(self, candidates: Sequence[Candidate]) -> Expected:
        """Return what to expect of candidates."""
        guesses, untraced = self._guess(candidates)
        errors, unmeasured = self._errors(self._rows(candidates))
        return Expected(guesses + errors, untraced, unmeasured)

    def _guess(self, candidates: Sequence[Candidate]) -> tuple[Array, Array]:
        """Return predicted logarithms, interpolated for what was not traced, and their standard deviations."""
        if not self.predicted:
            return np.zeros(len(candidates)), np.zeros(len(candidates))
        mean, deviation = self._traced(self._rows(candidates))
        known = np.asarray([candidate in self.predicted for candidate in candidates], bool)
        exact = np.asarray([self.predicted.get(candidate, 0.0) for candidate in candidates])
        return np.where(known, exact, mean), np.where(known, 0.0, deviation)

    def _rows(self, candidates: Iterable[Candidate]) -> Array:
        """Return a row for each candidate, with a one for each of its choices."""
        listed = list(candidates)
        rows = np.zeros((len(listed), len(self._columns)))
        for row, candidate in zip(rows, listed, strict=True):
            row[[self._columns[item] for item in candidate.items() if item in self._columns]] = 1.0
        return rows


class Process:
    """A Gaussian process with the mean of its values (Rasmussen and Williams 2006, algorithm 2.1).

    Its kernel counts the choices that two candidates share, and lets what is special in one combination fall with the
    number of choices that differ.
    """

    def __init__(self, rows: Array, values: Array, variance: Variance, knobs: int) -> None:
        self._rows, self._variance, self._knobs = rows, variance, knobs
        self._mean = float(values.mean()) if len(values) else 0.0
        self._inverse = np.linalg.inv(self._kernel(rows) + variance.noise * np.eye(len(rows)))
        self._weights = self._inverse @ (values - self._mean)

    def __call__(self, rows: Array) -> tuple[Array, Array]:
        """Return means and standard deviations."""
        near = self._kernel(rows)
        own = self._variance.choice * self._knobs + self._variance.combination
        variance = own - np.einsum("ij,jk,ik->i", near, self._inverse, near)
        return self._mean + near @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _kernel(self, rows: Array) -> Array:
        shared = rows @ self._rows.T
        differing = self._knobs - shared
        return np.asarray(self._variance.choice * shared + self._variance.combination * np.exp(-differing / _REACH))
