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
from autotune.study.judge import Judge, Priority
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

_SURROUNDINGS = 200
"""Random candidates that are considered in addition to the incumbent's neighbours."""

_MOST_EXAMINED = 65_536
"""Number of candidates examined, in 3 s, before a search ends for lack of a proposal; a space with no more combinations
is then exhausted."""

_AUDITED = 4096
"""Number of random candidates from which an audit selects."""


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
        by_need: bool = False,
        traced: Collection[Candidate] = (),
    ) -> Candidate | None:
        """Return an unknown candidate, the most promising of those with the smallest priority; None if there is none.

        The sampler's candidates may be vetoed, since the sampler learns from vetoes; all others are worth a probe.

        Args:
            incumbent: the best candidate so far.
            explore: whether the sampler's candidates come before the incumbent's neighbours.
            by_need: whether to return the candidate with the smallest predicted need.
            traced: candidates that were traced for this probe, if no further traces are allowed; then only they and
                others with a prediction are considered, if there are any.
        """
        # A study object caches the trials that it has read until it starts or finishes a trial itself.
        self._study = copy.copy(self._study)
        surrogate = self._surrogate()
        if explore and not by_need:
            for _ in range(_DRAWS):
                candidate = self._problem.normal(self._draw())
                if self._is_in_turn(candidate) and surrogate.excess(candidate) <= _NEAR_MISS:
                    return candidate
        found = self._surroundings(incumbent)
        if traced:
            known = (each for each in found if self._predictor.predict(each) is not None)
            found = dict.fromkeys((*known, *(each for one in traced for each in self._fresh(one))))
        if not found:
            return next(self._by_chance(_MOST_EXAMINED), None)
        ranked = (
            sorted(found, key=self._judge.need_bytes) if by_need else surrogate.promising_first(found, self._standing())
        )
        return min(ranked, key=self._rank)

    @property
    def ending(self) -> Ending:
        """The reason for the end of a search when no candidate is proposed."""
        return Ending.EXHAUSTED if self._combinations() <= _MOST_EXAMINED else Ending.SAMPLED

    def expected_gain(self, incumbent: Candidate) -> float:
        """Return the largest expected improvement over the best probed candidate, as a share of its rate.

        Considered are the incumbent's neighbours, traced candidates and random ones.
        """
        return self._surrogate().expected_gain(list(self._surroundings(incumbent)), self._standing())

    def _standing(self) -> list[Candidate]:
        """Return the probed candidates that may be recommended."""
        return [record.candidate for record in standing(self._log.records, self._judge)]

    def _surrogate(self) -> Surrogate:
        return Surrogate(self._problem.choices, self._log.records, self._log.memory_limit_bytes, self._predictor)

    def by_chance(self) -> Iterator[Candidate]:
        """Yield random unknown candidates, vetoed ones included."""
        for candidate in self._drawn(_AUDITED):
            if self._judge.is_open(candidate):
                yield candidate

    def _is_in_turn(self, candidate: Candidate) -> bool:
        """Whether a draw is open and either vetoed or probably feasible: smaller than candidates that timed out and, by
        predictions, than those that ran out of memory."""
        if not self._judge.is_open(candidate):
            return False
        if self._judge.priority(candidate) is not Priority.ABOVE:
            return not self._judge.failures.is_slow(candidate)
        return self._judge.veto(candidate) is not None

    def _rank(self, candidate: Candidate) -> tuple[Priority, bool, float]:
        """Return a sort key: priority, whether micro-batches no larger timed out, and for priority ``ABOVE`` the
        predicted need."""
        priority = self._judge.priority(candidate)
        need_bytes = self._judge.need_bytes(candidate) if priority is Priority.ABOVE else 0.0
        return priority, self._judge.failures.is_slow(candidate), need_bytes

    def _draw(self) -> Candidate:
        # A trial outside the study lets the sampler draw without adding a trial per draw.
        blank = optuna.trial.create_trial(state=TrialState.RUNNING)
        drawn = self._sampler.sample_relative(self._study, blank, self._log.space)
        for knob, distribution in self._log.space.items():
            if knob not in drawn:
                drawn[knob] = self._sampler.sample_independent(self._study, blank, knob, distribution)
        return Candidate({knob: drawn.get(knob, options[0]) for knob, options in self._problem.choices.items()})

    def _surroundings(self, incumbent: Candidate | None) -> dict[Candidate, None]:
        found = [fresh for candidate in self._predictor.traced() for fresh in self._fresh(candidate)]
        found.extend(self._by_chance(_SURROUNDINGS))
        if incumbent is not None:
            for knob, options in self._problem.choices.items():
                for choice in options:
                    found.extend(self._fresh(incumbent.but(**{knob: choice})))
        return dict.fromkeys(found)

    def _by_chance(self, count: int) -> Iterator[Candidate]:
        for candidate in self._drawn(count):
            yield from self._fresh(candidate)

    def _drawn(self, count: int) -> Iterator[Candidate]:
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

    def _fresh(self, candidate: Candidate) -> Iterator[Candidate]:
        normal = self._problem.normal(candidate)
        if self._judge.is_open(normal) and self._judge.veto(normal) is None:
            yield normal
