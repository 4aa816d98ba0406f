"""Proposes the next candidates: from Optuna's sampler, or by the surrogate's ranking."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Collection, Iterator

import optuna
from optuna.trial import TrialState

from autotune.core.candidate import Candidate
from autotune.core.prediction import Predictor
from autotune.core.status import Ending
from autotune.study.judge import Judge
from autotune.study.problem import Problem
from autotune.study.selection import standing
from autotune.study.surrogate import Surrogate
from autotune.study.trial_log import TrialLog

_DRAWS = 32
"""Draws from the sampler for one proposal; TPE on a small categorical space repeats itself."""

_NEAR_MISS = 0.2
"""Largest logarithm of need over limit at which a draw is probed; the best candidates are close to the limit.

In replayed spaces, 0 missed some of these; 0.4 found no more, and ran out of memory more often.
"""

_RANDOM_CANDIDATES = 200
"""Random candidates that are considered in addition to the incumbent's neighbours."""

_MOST_EXAMINED = 65_536
"""Number of candidates examined, in 3 s, before a search ends for lack of a proposal; a space with no more combinations
is then exhausted."""


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
            return next(self._random_worth_probing(_MOST_EXAMINED), None)
        return min(surrogate.rank_by_gain(pool, self._standing()), key=self._judge.failures.is_slow)

    @property
    def ending(self) -> Ending:
        """The reason for the end of a search when no candidate is proposed."""
        return Ending.EXHAUSTED if self._combinations() <= _MOST_EXAMINED else Ending.SAMPLED

    def expected_gain(self, incumbent: Candidate) -> float:
        """Return the largest expected improvement over the best probed candidate, as a share of its rate.

        Considered are the incumbent's neighbours, traced candidates and random ones.
        """
        return self._surrogate().expected_gain(list(self._pool(incumbent)), self._standing())

    def _standing(self) -> list[Candidate]:
        """Return the probed candidates that may be recommended."""
        return [record.candidate for record in standing(self._log.records, self._judge)]

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
