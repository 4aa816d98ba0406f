"""The Optuna study of traces: runs the candidates that `Improvements` proposes, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Candidate
from autotune.core.codec import encode
from autotune.core.estimate import Estimate, Runner
from autotune.study.improvement import Batch, Improvements
from autotune.study.problem import Problem

MOST_TRACED = 100
"""Most candidates that a plan traces. A trace of an 8B shape takes 0.4 to 0.7 s of one core, and a candidate two to six
of them."""
_FIRST = (1, 3)
"""Candidates that are run at first, so that there is a ranking after a few seconds."""
_OTHER = "(another value)"
"""Stands in Optuna's parameters for a choice of a normal form that is none of the space's, such as a shorter length."""
_CANDIDATE, _NEED, _REASON = "candidate", "predicted memory", "reason"


class TraceSampler(BaseSampler):
    """Samples what :class:`~autotune.study.improvement.Improvements` proposes.

    The objective is speed, and memory a constraint.

    :meth:`batch` returns the next candidates; then Optuna asks for each of them, since the contract of a sampler knows
    single trials alone.
    """

    def __init__(self, improvements: Improvements, space: Mapping[str, CategoricalDistribution]) -> None:
        self._proposals = improvements.proposals()
        self._space = dict(space)
        self._left: list[Candidate] = []
        self._next: Iterator[Candidate] = iter(())

    def batch(self, most: int) -> Batch:
        """Return up to so many candidates, which trials are asked for next; none at the end of the search."""
        while not self._left:
            proposed = next(self._proposals, None)
            if proposed is None:
                return ()
            self._left = list(proposed)
        batch, self._left = self._left[:most], self._left[most:]
        self._next = iter(batch)
        return batch

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the whole space."""
        return {**self._space}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the choices of the next candidate of the batch."""
        candidate = next(self._next)
        known = {knob: candidate[knob] in self._space[knob].choices for knob in search_space}
        return {knob: candidate[knob] if known[knob] else _OTHER for knob in search_space}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuse: every knob is sampled together with the others."""
        raise NotImplementedError(f"{param_name} is not in the space of this study")


@dataclass(frozen=True)
class TracedSearch:
    """The result of a search by traces.

    Attributes:
        study: with one trial for each candidate.
        finished: whether no further change was worth a trace; else a limit ended the search.
    """

    study: optuna.Study
    finished: bool


def search_by_traces(
    problem: Problem,
    runner: Runner,
    *,
    starts: Sequence[Candidate] | None = None,
    limit: int = MOST_TRACED,
    at_once: int = MOST_TRACED,
    goes_on: Callable[[], bool] = lambda: True,
) -> TracedSearch:
    """Run candidates of a problem until none is likely to improve the best, or a limit is reached.

    Args:
        starts: candidates that are run first, after the baseline; None: the recipes.
        limit: most candidates that are run.
        at_once: most of them between two calls of ``goes_on``.
        goes_on: returns whether to continue.

    Raises:
        AutotuneError: the runner cannot run anything.
    """
    known: dict[Candidate, Estimate] = {}
    space = {
        knob: CategoricalDistribution((*dict.fromkeys(choices), _OTHER)) for knob, choices in problem.choices.items()
    }
    sampler = TraceSampler(Improvements(problem, known, starts), space)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    sizes = list(_FIRST)
    while goes_on():
        most = min(limit - len(known), at_once, sizes.pop(0) if sizes else at_once)
        batch = sampler.batch(most) if most > 0 else ()
        if not batch:
            return TracedSearch(study, finished=most > 0)
        trials = [study.ask({**space}) for _ in batch]
        for trial, estimate in zip(trials, runner.run(batch), strict=True):
            known[estimate.candidate] = estimate
            _tell(study, trial, estimate)
    return TracedSearch(study, finished=False)


def _tell(study: optuna.Study, trial: optuna.Trial, estimate: Estimate) -> None:
    """Record a result: what cannot be traced fails, and what does not fit violates the constraint."""
    memory, spare_bytes = estimate.memory, estimate.spare_bytes
    trial.set_user_attr(_CANDIDATE, encode(estimate.candidate))
    if memory is None or spare_bytes is None:
        trial.set_user_attr(_REASON, estimate.reason)
        study.tell(trial, state=TrialState.FAIL)
        return
    trial.set_user_attr(_NEED, memory.device_bytes)
    trial.set_constraint(_NEED, -spare_bytes / max(1, memory.device_bytes + spare_bytes))
    study.tell(trial, estimate.tokens_per_second or 0.0)
