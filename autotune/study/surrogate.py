"""Predicts rate and memory of candidates from traces and probes, to rank the candidates to probe next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autotune.core.candidate import Candidate, Choice
from autotune.core.prediction import Predictor
from autotune.core.status import ProbeStatus
from autotune.study.gaussian import MIN_CHANCE, Array, Codes, FigureModel, chances, expected_improvement, normal_cdf
from autotune.study.problem import Record
from autotune.study.trial_documents import violation

_MIN_VIOLATION = -0.99
"""Lower bound of the violation of the limit, to keep its logarithm finite."""

_BROKEN = frozenset({ProbeStatus.CRASHED, ProbeStatus.UNSUPPORTED})
"""Failures of a probe that are due to its choices, independent of memory and time."""


class Surrogate:
    """Models rate and memory as Gaussian processes over the choices, in logarithms.

    One process models the predicted figures, and interpolates them for untraced candidates. A second one models the
    ratio of measured to predicted figures. Without predictions, there is only the second. For traced candidates, the
    predicted need counts: measured memory of other candidates does not improve it.

    Example: bf16 was predicted to be twice as fast and was 1.5 times as fast, with one packing and batch size. It is
    expected to be about 1.5 times as fast with others too, traced or not.
    """

    def __init__(
        self,
        choices: Mapping[str, Sequence[Choice]],
        records: Sequence[Record],
        memory_limit_bytes: int,
        predictor: Predictor,
    ) -> None:
        observed = [record for record in records if record.measurement.ok or _ran_out_of_device_memory(record)]
        candidates = dict.fromkeys((*predictor.traced(), *(record.candidate for record in observed)))
        predictions = {candidate: predictor.predict(candidate) for candidate in candidates}
        predicted = {candidate: prediction for candidate, prediction in predictions.items() if prediction is not None}

        def observed_need(record: Record) -> float:
            return float(np.log1p(max(_MIN_VIOLATION, violation(record.measurement, memory_limit_bytes))))

        rates = {each: prediction.tokens_per_second for each, prediction in predicted.items()}
        self._codes = codes = Codes(choices)
        self._ran = {record.candidate: record.measurement.status not in _BROKEN for record in records if record.probed}
        self._need = FigureModel(
            codes,
            {each: float(np.log(prediction.need_bytes / memory_limit_bytes)) for each, prediction in predicted.items()},
            {record.candidate: observed_need(record) for record in observed if record.candidate not in predicted},
        )
        self._rate = FigureModel(
            codes,
            {each: float(np.log(rate)) for each, rate in rates.items() if rate},
            {each.candidate: float(np.log(each.tokens_per_second)) for each in observed if each.tokens_per_second},
        )

    def excess(self, candidate: Candidate) -> float:
        """Return the posterior mean of log(need / limit): above 0, the candidate is not expected to fit."""
        return float(self._need([candidate]).mean[0])

    def rank_by_gain(self, candidates: Iterable[Candidate], standing: Sequence[Candidate]) -> list[Candidate]:
        """Sort candidates by descending expected improvement over the probed ones that may be recommended.

        Without predictions, candidates are ranked by their expected rate, those that are not expected to fit last: the
        sampler explores, and replayed searches did worse with the expected improvement here.
        """
        listed = list(candidates)
        need = self._need(listed)
        excess = np.maximum(need.mean - need.untraced, 0.0)
        if self._rate.predicted:
            order = np.lexsort((excess, -self._gains(listed, standing)))
        else:
            order = np.lexsort((-self._rate(listed).mean, excess, chances(self._codes, self._ran, listed) < MIN_CHANCE))
        return [listed[index] for index in order]

    def expected_gain(self, candidates: Sequence[Candidate], standing: Sequence[Candidate]) -> float:
        """Return the largest expected improvement, as a share of the best rate; infinite without candidates."""
        return float(self._gains(candidates, standing).max()) if candidates else np.inf

    def _gains(self, candidates: Sequence[Candidate], standing: Sequence[Candidate]) -> Array:
        """Return the expected improvement of each candidate, as a share of the best rate.

        Candidates that are slower, crash or do not fit improve nothing (with a constraint: Schonlau, Welch and Jones
        1998). The best rate is the highest posterior mean of probed candidates, since the highest measured rate is
        biased by noise; if none may be recommended, that of these candidates. The need of traced ones counts as known.
        """
        need, rate = self._need(candidates), self._rate(candidates)
        fits = normal_cdf(-need.mean, need.untraced if self._need.predicted else need.unmeasured)
        best = self._rate(standing).mean.max() if standing else rate.mean.max()
        improvement = expected_improvement(rate.mean - best, np.hypot(rate.untraced, rate.unmeasured))
        return np.asarray(chances(self._codes, self._ran, candidates) * fits * improvement)


def _ran_out_of_device_memory(record: Record) -> bool:
    measured = record.measurement
    return measured.status is ProbeStatus.OUT_OF_MEMORY and measured.out_of_memory is not None
