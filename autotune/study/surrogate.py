"""Predicts rate and memory of a candidate from traces and probes, only to order which candidates to probe next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.core.candidate import Candidate, Choice
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import ProbeStatus
from autotune.study.problem import Record
from autotune.study.violation import violation

Array = NDArray[np.float64]


@dataclass(frozen=True)
class _Variance:
    """Variances of a logarithm: by each choice, by the combination of all choices, and of a single observation.

    A variance by choice of 0.1 expects that one choice changes the figure by a third, up or down.
    """

    choice: float
    combination: float
    noise: float


_OF_CANDIDATES = _Variance(choice=0.1, combination=0.02, noise=0.01)
"""Of a figure without a prediction."""

_OF_TRACES = _Variance(choice=0.1, combination=0.02, noise=1e-4)
"""Of a predicted figure; a trace has hardly any noise."""

_OF_ERRORS = _Variance(choice=0.05, combination=0.02, noise=0.005)
"""Of the ratio of a measured figure to the predicted one: operators of one kind are off together."""

_REACH = 2.0
"""Differing choices over which the correlation of a combination falls to 1/e."""


class Surrogate:
    """Models rate and memory as Gaussian processes over the choices, in logarithms.

    Predicted figures of traced candidates are one process, which gives a guess for candidates that were not traced. The
    ratio of measured to predicted figures is a second one. Without predictions, there is only the second.

    Example: bf16 was predicted to be twice as fast and was 1.5 times as fast, with one packing and batch size. It is
    expected to be about 1.5 times as fast with others too, traced or not.
    """

    def __init__(
        self,
        choices: Mapping[str, Sequence[Choice]],
        records: Iterable[Record],
        memory_limit_bytes: int,
        predictor: Predictor,
    ) -> None:
        guesses = {candidate: predictor.predict(candidate) for candidate in predictor.traced()}
        shown = [record for record in records if record.measurement.ok or _lacked_device_memory(record)]
        for record in shown:
            guesses[record.candidate] = predictor.predict(record.candidate)
        known = {candidate: guess for candidate, guess in guesses.items() if guess is not None}

        def need(guess: Prediction) -> float:
            return float(np.log(guess.need_bytes / memory_limit_bytes))

        def shown_need(record: Record) -> float:
            measured = float(np.log1p(violation(record.measurement, memory_limit_bytes)))
            guess = known.get(record.candidate)
            return max(measured, need(guess)) if guess is not None and guess.partly_measured else measured

        rates = {each: guess.tokens_per_second for each, guess in known.items()}
        self._need = _Figure(
            choices,
            {each: need(guess) for each, guess in known.items()},
            {record.candidate: shown_need(record) for record in shown},
        )
        self._rate = _Figure(
            choices,
            {each: float(np.log(rate)) for each, rate in rates.items() if rate},
            {record.candidate: float(np.log(record.tokens_per_second)) for record in shown if record.tokens_per_second},
        )

    def excess(self, candidate: Candidate) -> float:
        """Return the logarithm of a candidate's expected need over the limit: above 0, it should not fit."""
        return float(self._need([candidate]).mean[0])

    def promising_first(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates by their rate, the fastest first, and after them those that should not fit.

        With predictions, candidates are ranked by the upper end of one standard deviation, so that what is not known
        well is traced or probed. A candidate that was not traced counts as fitting if it may: a trace shows it. Without
        predictions the sampler explores, and replayed searches did worse with it here.
        """
        listed = list(candidates)
        if not listed:
            return []
        need, rate = self._need(listed), self._rate(listed)
        excess = need.mean - need.untraced
        score = rate.mean + (np.hypot(rate.untraced, rate.unmeasured) if self._rate.predicted else 0.0)
        order = np.lexsort((-score, np.maximum(excess, 0.0)))
        return [listed[index] for index in order]


def _lacked_device_memory(record: Record) -> bool:
    measured = record.measurement
    return measured.status is ProbeStatus.OUT_OF_MEMORY and measured.out_of_memory is not None


@dataclass(frozen=True)
class _Expected:
    """Expected logarithms of some candidates, and their standard deviations for lack of a trace and of a probe."""

    mean: Array
    untraced: Array
    unmeasured: Array


class _Figure:
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
        self._columns = {
            (knob, choice): index
            for index, (knob, choice) in enumerate((knob, choice) for knob, each in choices.items() for choice in each)
        }
        self._traced = _Process(self._rows(predicted), np.asarray(list(predicted.values())), _OF_TRACES)
        guesses, _ = self._guess(list(measured))
        variance = _OF_ERRORS if predicted else _OF_CANDIDATES
        self._errors = _Process(self._rows(measured), np.asarray(list(measured.values())) - guesses, variance)

    def __call__(self, candidates: Sequence[Candidate]) -> _Expected:
        """Return what to expect of candidates."""
        guesses, untraced = self._guess(candidates)
        errors, unmeasured = self._errors(self._rows(candidates))
        return _Expected(guesses + errors, untraced, unmeasured)

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


class _Process:
    """A Gaussian process with the mean of its values (Rasmussen and Williams 2006, algorithm 2.1).

    Its kernel counts the choices that two candidates share, and lets what is special in one combination fall with the
    number of choices that differ.
    """

    def __init__(self, rows: Array, values: Array, variance: _Variance) -> None:
        self._rows, self._variance = rows, variance
        self._mean = float(values.mean()) if len(values) else 0.0
        self._inverse = np.linalg.inv(self._kernel(rows) + variance.noise * np.eye(len(rows)))
        self._weights = self._inverse @ (values - self._mean)

    def __call__(self, rows: Array) -> tuple[Array, Array]:
        """Return means and standard deviations."""
        near = self._kernel(rows)
        own = self._variance.choice * rows.sum(axis=1) + self._variance.combination
        variance = own - np.einsum("ij,jk,ik->i", near, self._inverse, near)
        return self._mean + near @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _kernel(self, rows: Array) -> Array:
        shared = rows @ self._rows.T
        differing = rows.sum(axis=1)[:, None] - shared
        return np.asarray(self._variance.choice * shared + self._variance.combination * np.exp(-differing / _REACH))
