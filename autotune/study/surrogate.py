"""A guess at what a candidate would show, from what the probes so far showed; it only orders what to probe next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from autotune.core.candidate import Candidate, Choice
from autotune.core.prediction import Prediction
from autotune.study.problem import Record
from autotune.study.violation import violation

_RIDGE = 0.1
"""Weight of the prior that a choice changes nothing, or nothing beyond what was predicted, in probes."""

_SPREAD = 0.1
"""Standard deviation of a probe's rate around the product of factors, in logarithms. With the weight above, a choice is
expected to change the rate by a third, up or down."""


class Surrogate:
    """Rate and memory as products of one factor per choice, which is how knobs that do not interact combine.

    Where candidates are predicted, the factors are of what was measured over what was predicted.
    """

    def __init__(
        self,
        choices: Mapping[str, Sequence[Choice]],
        records: Iterable[Record],
        memory_limit_bytes: int,
        predict: Callable[[Candidate], Prediction | None],
    ) -> None:
        columns = [(knob, choice) for knob, options in choices.items() for choice in options]
        shown = [record for record in records if record.measurement.ok or record.measurement.out_of_memory]

        def need(candidate: Candidate) -> float | None:
            prediction = predict(candidate)
            return float(np.log(prediction.need_bytes / memory_limit_bytes)) if prediction else None

        def rate(candidate: Candidate) -> float | None:
            prediction = predict(candidate)
            return float(np.log(prediction.tokens_per_second)) if prediction and prediction.tokens_per_second else None

        def shown_need(record: Record) -> float:
            measured = float(np.log1p(violation(record.measurement, memory_limit_bytes)))
            prediction = predict(record.candidate)
            predicted = need(record.candidate) if prediction and prediction.least else None
            return measured if predicted is None else max(measured, predicted)

        needs = {record.candidate: shown_need(record) for record in shown}
        rates = {
            record.candidate: float(np.log(record.tokens_per_second)) for record in shown if record.tokens_per_second
        }
        self._need = _Factors(columns, needs, need)
        self._rate = _Factors(columns, rates, rate)

    def excess(self, candidate: Candidate) -> float:
        """Return the logarithm of what a candidate should need over the limit: above 0, it should not fit."""
        return self._need(candidate)

    def promising_first(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates by their rate, the fastest first, and after them those that should not fit.

        Where rates are predicted, a candidate's is the one that it may well have: what no probe has shown yet may be
        where the predictions are wrong. Replayed searches came to a plateau without, and stayed there. Where nothing is
        predicted, the sampler sees to that, and replayed searches did worse.
        """

        def rank(candidate: Candidate) -> tuple[bool, float]:
            excess = self.excess(candidate)
            return excess > 0, excess if excess > 0 else -self._rate.hoped(candidate)

        return sorted(candidates, key=rank)


class _Factors:
    """Logarithms of one factor per choice and one for all, on top of what was predicted.

    How far predictions are to be believed is found out with them: by which power of what was predicted what was shown
    grows beyond the first.
    """

    def __init__(
        self,
        columns: Sequence[tuple[str, Choice]],
        shown: Mapping[Candidate, float],
        predicted: Callable[[Candidate], float | None],
    ) -> None:
        self._columns = {column: index for index, column in enumerate(columns)}
        self._predicted = predicted
        known = [guess for guess in map(predicted, shown) if guess is not None]
        # What was never held against a measurement has no scale.
        self._mean = fmean(known) if known else None
        rows = np.stack([self._row(candidate) for candidate in shown]) if shown else np.zeros((0, len(columns) + 2))
        self._uncertainty = np.linalg.inv(rows.T @ rows + _RIDGE * np.eye(rows.shape[1]))
        targets = np.asarray([value - self._prior(candidate) for candidate, value in shown.items()])
        mean = float(targets.mean()) if shown else 0.0
        self._weights = np.asarray(self._uncertainty @ rows.T @ (targets - mean), np.float64)
        self._weights[-1] += mean

    def __call__(self, candidate: Candidate) -> float:
        """Return the logarithm for a candidate."""
        return self._prior(candidate) + float(self._row(candidate) @ self._weights)

    def hoped(self, candidate: Candidate) -> float:
        """Return the logarithm one standard deviation above the likeliest where it is predicted, else the likeliest."""
        if self._mean is None:
            return self(candidate)
        row = self._row(candidate)
        return self(candidate) + _SPREAD * float(np.sqrt(row @ self._uncertainty @ row))

    def _prior(self, candidate: Candidate) -> float:
        if self._mean is None:
            return 0.0
        guess = self._predicted(candidate)
        return self._mean if guess is None else guess

    def _row(self, candidate: Candidate) -> NDArray[np.float64]:
        row = np.zeros(len(self._columns) + 2)
        row[-1] = 1.0
        row[-2] = self._prior(candidate) - (self._mean or 0.0)
        for column in candidate.items():
            if column in self._columns:
                row[self._columns[column]] = 1.0
        return row
