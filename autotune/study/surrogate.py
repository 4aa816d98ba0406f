"""Predicts rate and memory of a candidate from the probes so far, only to order which candidates to probe next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from autotune.core.candidate import Candidate, Choice
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus
from autotune.study.problem import Record
from autotune.study.violation import violation

_RIDGE = 0.1
"""Weight, in probes, of the prior that a choice changes nothing, or nothing beyond the prediction."""

_SPREAD = 0.1
"""Standard deviation of a probe's rate around the product of factors, in logarithms. With the weight above, a choice is
expected to change the rate by a third, up or down."""


class Surrogate:
    """Models rate and memory as products of one factor per choice: an additive model of logarithms, no interactions.

    Where candidates are predicted, the factors are for the ratio of the measured to the predicted figure.

    Example: the factors 1.5 for packing and 2 for bf16 give 3 for both together. The prior pulls factors that few
    probes support towards 1.
    """

    def __init__(
        self,
        choices: Mapping[str, Sequence[Choice]],
        records: Iterable[Record],
        memory_limit_bytes: int,
        predict: Callable[[Candidate], Prediction | None],
    ) -> None:
        columns = [(knob, choice) for knob, options in choices.items() for choice in options]
        shown = [record for record in records if record.measurement.ok or _lacked_device_memory(record)]

        def need(candidate: Candidate) -> float | None:
            prediction = predict(candidate)
            return float(np.log(prediction.need_bytes / memory_limit_bytes)) if prediction else None

        def rate(candidate: Candidate) -> float | None:
            prediction = predict(candidate)
            return float(np.log(prediction.tokens_per_second)) if prediction and prediction.tokens_per_second else None

        def shown_need(record: Record) -> float:
            measured = float(np.log1p(violation(record.measurement, memory_limit_bytes)))
            prediction = predict(record.candidate)
            predicted = need(record.candidate) if prediction and prediction.partly_measured else None
            return measured if predicted is None else max(measured, predicted)

        needs = {record.candidate: shown_need(record) for record in shown}
        rates = {
            record.candidate: float(np.log(record.tokens_per_second)) for record in shown if record.tokens_per_second
        }
        self._need = _Factors(columns, needs, need)
        self._rate = _Factors(columns, rates, rate)

    def excess(self, candidate: Candidate) -> float:
        """Return the logarithm of a candidate's expected need over the limit: above 0, it should not fit."""
        return self._need(candidate)

    def promising_first(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates by their rate, the fastest first, and after them those that should not fit.

        Where rates are predicted, candidates are ranked by an optimistic rate, one standard deviation up, since
        predictions may be wrong where no probe has run. Without that, replayed searches stayed on a plateau. Where
        nothing is predicted, the sampler does this exploration, and replayed searches did worse with it here.
        """

        def rank(candidate: Candidate) -> tuple[bool, float]:
            excess = self.excess(candidate)
            return excess > 0, excess if excess > 0 else -self._rate.hoped(candidate)

        return sorted(candidates, key=rank)


def _lacked_device_memory(record: Record) -> bool:
    measured = record.measurement
    return measured.status is ProbeStatus.OUT_OF_MEMORY and measured.out_of_memory is not None


class _Factors:
    """Fits the logarithms of one factor per choice and one common factor, on top of the prediction.

    The fit includes the exponent by which measured figures grow with the predicted ones, in addition to 1.
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
        # Predictions that were never compared with a measurement have no scale.
        self._mean = fmean(known) if known else None
        rows = np.stack([self._row(candidate) for candidate in shown]) if shown else np.zeros((0, len(columns) + 2))
        self._uncertainty = np.linalg.inv(rows.T @ rows + _RIDGE * np.eye(rows.shape[1]))
        targets = np.asarray([value - self._prior(candidate) for candidate, value in shown.items()])
        mean = float(targets.mean()) if shown else 0.0
        self._weights = np.asarray(self._uncertainty @ rows.T @ (targets - mean), np.float64)
        self._weights[-1] += mean

    def __call__(self, candidate: Candidate) -> float:
        """Return the expected logarithm for a candidate."""
        return self._prior(candidate) + float(self._row(candidate) @ self._weights)

    def hoped(self, candidate: Candidate) -> float:
        """Return the expected logarithm, plus one standard deviation where candidates are predicted."""
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
