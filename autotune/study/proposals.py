"""Proposes the next candidates: from Optuna's sampler, or by a model of rate and memory from traces and probes."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import optuna
from optuna.trial import TrialState

from autotune.core.candidate import Candidate, Choice
from autotune.core.prediction import Predictor
from autotune.core.status import Ending, ProbeStatus
from autotune.study.gaussian import MIN_CHANCE, Array, Codes, FigureModel, chances, expected_improvement, normal_cdf
from autotune.study.judge import Judge, recommendable_records
from autotune.study.problem import Problem, Record
from autotune.study.trial_documents import violation
from autotune.study.trial_log import TrialLog

_DRAWS = 32
"""Draws from the sampler for one proposal; TPE on a small categorical space repeats itself."""

_NEAR_MISS = 0.2
"""Largest logarithm of need over limit at which a draw is probed; the best candidates are close to the limit.

In replayed spaces, 0 missed some of these; 0.4 found no more, and ran out of memory more often.
"""

_RANDOM_CANDIDATES = 200
"""Random candidates that are considered in addition to the incumbent's neighbours."""

_MAX_EXAMINED = 65_536
"""Number of candidates examined, in 3 s, before a search ends for lack of a proposal; a space with no more combinations
is then exhausted."""
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

    def rank_by_gain(self, candidates: Iterable[Candidate], recommendable: Sequence[Candidate]) -> list[Candidate]:
        """Sort candidates by descending expected improvement over the probed ones that may be recommended.

        Without predictions, candidates are ranked by their expected rate, those that are not expected to fit last: the
        sampler explores, and replayed searches did worse with the expected improvement here.
        """
        listed = list(candidates)
        need = self._need(listed)
        excess = np.maximum(need.mean - need.untraced, 0.0)
        if self._rate.predicted:
            order = np.lexsort((excess, -self._gains(listed, recommendable)))
        else:
            order = np.lexsort((-self._rate(listed).mean, excess, chances(self._codes, self._ran, listed) < MIN_CHANCE))
        return [listed[index] for index in order]

    def expected_gain(self, candidates: Sequence[Candidate], recommendable: Sequence[Candidate]) -> float:
        """Return the largest expected improvement, as a share of the best rate; infinite without candidates."""
        return float(self._gains(candidates, recommendable).max()) if candidates else np.inf

    def _gains(self, candidates: Sequence[Candidate], recommendable: Sequence[Candidate]) -> Array:
        """Return the expected improvement of each candidate, as a share of the best rate.

        Candidates that are slower, crash or do not fit improve nothing (with a constraint: Schonlau, Welch and Jones
        1998). The best rate is the highest posterior mean of probed candidates, since the highest measured rate is
        biased by noise; if none may be recommended, that of these candidates. The need of traced ones counts as known.
        """
        need, rate = self._need(candidates), self._rate(candidates)
        fits = normal_cdf(-need.mean, need.untraced if self._need.predicted else need.unmeasured)
        best = self._rate(recommendable).mean.max() if recommendable else rate.mean.max()
        improvement = expected_improvement(rate.mean - best, np.hypot(rate.untraced, rate.unmeasured))
        return np.asarray(chances(self._codes, self._ran, candidates) * fits * improvement)


def _ran_out_of_device_memory(record: Record) -> bool:
    measured = record.measurement
    return measured.status is ProbeStatus.OUT_OF_MEMORY and measured.out_of_memory is not None


class Proposer:
    """Proposes unknown candidates in their normal form."""

    def __init__(
        self, problem: Problem, judge: Judge, study: optuna.Study, log: TrialLog, predictor: Predictor, seed: int
    ) -> None:
        self._problem = problem
        self._judge = judge
        self._study = study
        self._log = log
        self._predictor = predictor
        self._random = random.Random(seed)
        # No constant liar: the judge excludes candidates that other workers are probing.
        self._sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=False)

    def proposal(
        self,
        incumbent: Candidate | None,
        *,
        explore: bool,
        traced: Collection[Candidate] = (),
    ) -> Candidate | None:
        """Return the most promising unknown candidate; None if there is none.

        The sampler's candidates may be vetoed, since the sampler learns from vetoes; all others are worth a probe.

        Args:
            incumbent: the best candidate so far.
            explore: whether the sampler's candidates come before the incumbent's neighbours.
            traced: candidates that were traced for this probe, if no further traces are allowed; then only they and
                others with a prediction are considered, if there are any.
        """
        # A study object caches the trials that it has read until it starts or finishes a trial itself.
        self._study = copy.copy(self._study)
        surrogate = self._surrogate()
        if explore:
            for _ in range(_DRAWS):
                candidate = self._problem.normal(self._draw())
                wanted = self._judge.is_open(candidate) and not self._judge.failures.is_slow(candidate)
                if wanted and surrogate.excess(candidate) <= _NEAR_MISS:
                    return candidate
        pool = self._pool(incumbent)
        if traced:
            predicted = (each for each in pool if self._predictor.predict(each) is not None)
            pool = dict.fromkeys((*predicted, *(each for one in traced for each in self._worth_probing(one))))
        if not pool:
            return next(self._random_worth_probing(_MAX_EXAMINED), None)
        return min(surrogate.rank_by_gain(pool, self._recommendable()), key=self._judge.failures.is_slow)

    @property
    def ending(self) -> Ending:
        """The reason for the end of a search when no candidate is proposed."""
        return Ending.EXHAUSTED if self._combinations() <= _MAX_EXAMINED else Ending.SAMPLED

    def expected_gain(self, incumbent: Candidate) -> float:
        """Return the largest expected improvement over the best probed candidate, as a share of its rate.

        Considered are the incumbent's neighbours, traced candidates and random ones.
        """
        return self._surrogate().expected_gain(list(self._pool(incumbent)), self._recommendable())

    def _recommendable(self) -> list[Candidate]:
        """Return the probed candidates that may be recommended."""
        return [record.candidate for record in recommendable_records(self._log.records, self._judge)]

    def _surrogate(self) -> Surrogate:
        return Surrogate(self._problem.choices, self._log.records, self._log.memory_limit_bytes, self._predictor)

    def _draw(self) -> Candidate:
        # A trial outside the study lets the sampler draw without adding a trial per draw.
        blank = optuna.trial.create_trial(state=TrialState.RUNNING)
        drawn = self._sampler.sample_relative(self._study, blank, self._log.space)
        for knob, distribution in self._log.space.items():
            if knob not in drawn:
                drawn[knob] = self._sampler.sample_independent(self._study, blank, knob, distribution)
        return Candidate({knob: drawn.get(knob, options[0]) for knob, options in self._problem.choices.items()})

    def _pool(self, incumbent: Candidate | None) -> dict[Candidate, None]:
        pool = [neighbour for candidate in self._predictor.traced() for neighbour in self._worth_probing(candidate)]
        pool.extend(self._random_worth_probing(_RANDOM_CANDIDATES))
        if incumbent is not None:
            for knob, options in self._problem.choices.items():
                for choice in options:
                    pool.extend(self._worth_probing(incumbent.but(**{knob: choice})))
        return dict.fromkeys(pool)

    def _random_worth_probing(self, count: int) -> Iterator[Candidate]:
        for candidate in self._random_combinations(count):
            yield from self._worth_probing(candidate)

    def _random_combinations(self, count: int) -> Iterator[Candidate]:
        # The length of a range is limited to sys.maxsize.
        combinations = range(min(self._combinations(), sys.maxsize))
        for number in self._random.sample(combinations, min(count, len(combinations))):
            picked, rest = {}, number
            for knob, options in self._problem.choices.items():
                rest, place = divmod(rest, len(options))
                picked[knob] = options[place]
            yield self._problem.normal(Candidate(picked))

    def _combinations(self) -> int:
        """Return the number of combinations of choices, illegal ones included."""
        return math.prod(len(options) for options in self._problem.choices.values())

    def _worth_probing(self, candidate: Candidate) -> Iterator[Candidate]:
        normal = self._problem.normal(candidate)
        if self._judge.is_open(normal) and self._judge.veto(normal) is None:
            yield normal
