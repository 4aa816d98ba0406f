"""A guess at what a candidate would show, from what the probes so far showed; it only orders what to probe next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.core.candidate import Candidate, Choice
from autotune.study.problem import Record
from autotune.study.violation import violation

_RIDGE = 0.1
"""Weight of the prior that a choice changes nothing, in probes."""


class Surrogate:
    """Rate and memory as products of one factor per choice, which is how knobs that do not interact combine."""

    def __init__(
        self, choices: Mapping[str, Sequence[Choice]], records: Iterable[Record], memory_limit_bytes: int
    ) -> None:
        self._columns = {
            column: index
            for index, column in enumerate((knob, choice) for knob, options in choices.items() for choice in options)
        }
        shown = [record for record in records if record.measurement.ok or record.measurement.out_of_memory]
        needs = [np.log1p(violation(record.measurement, memory_limit_bytes)) for record in shown]
        self._need = self._fit([record.candidate for record in shown], needs)
        ran = [record for record in shown if record.tokens_per_second]
        self._rate = self._fit(
            [record.candidate for record in ran], [np.log(record.tokens_per_second) for record in ran]
        )

    def excess(self, candidate: Candidate) -> float:
        """Return the logarithm of what a candidate should need over the limit: above 0, it should not fit."""
        return float(self._row(candidate) @ self._need)

    def promising_first(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates by their rate, the fastest first, and after them those that should not fit."""

        def rank(candidate: Candidate) -> tuple[bool, float]:
            excess = self.excess(candidate)
            return excess > 0, excess if excess > 0 else -float(self._row(candidate) @ self._rate)

        return sorted(candidates, key=rank)

    def _fit(self, candidates: Sequence[Candidate], targets: Sequence[float]) -> NDArray[np.float64]:
        width = len(self._columns) + 1
        if not candidates:
            return np.zeros(width)
        rows = np.stack([self._row(candidate) for candidate in candidates])
        mean = float(np.mean(targets))
        weights = np.asarray(
            np.linalg.solve(rows.T @ rows + _RIDGE * np.eye(width), rows.T @ (np.asarray(targets) - mean)), np.float64
        )
        weights[-1] += mean
        return weights

    def _row(self, candidate: Candidate) -> NDArray[np.float64]:
        row = np.zeros(len(self._columns) + 1)
        row[-1] = 1.0
        for column in candidate.items():
            if column in self._columns:
                row[self._columns[column]] = 1.0
        return row
