"""The Optuna study of traces: runs the candidates that `Improvements` proposes, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Candidate
from autotune.core.codec import encode
from autotune.core.estimate import Estimate, Runner
from autotune.study.improvement import Improvements
from autotune.study.problem import Problem

MOST_TRACED = 100
"""Most candidates that a plan traces. A trace of an 8B shape takes 0.4 to 0.7 s of one core, and a candidate two to six
of them."""
_FIRST = (1, 3)
"""Candidates that are run at first, so that there is a ranking after a few seconds."""
_OTHER = "(another value)"
"""Stands in Optuna's parameters for a choice of a normal form that is none of the space's, such as a shorter length."""
_CANDIDATE, _NEED, _REASON = "candidate", "predicted memory", "reason"


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
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    proposals = Improvements(problem, known, starts).proposals()
    left: list[Candidate] = []
    sizes = list(_FIRST)
    while goes_on():
        most = min(limit - len(known), at_once, sizes.pop(0) if sizes else at_once)
        if most <= 0:
            break
        left = left or list(next(proposals, ()))
        if not left:
            return TracedSearch(study, finished=True)
        batch, left = left[:most], left[most:]
        for estimate in runner.run(batch):
            known[estimate.candidate] = estimate
            study.add_trial(_trial(estimate, space))
    return TracedSearch(study, finished=False)


def _trial(estimate: Estimate, space: Mapping[str, CategoricalDistribution]) -> FrozenTrial:
    """Return a result as a trial: the value is speed, what cannot be traced fails, and memory is a constraint."""
    candidate, memory, spare_bytes = estimate.candidate, estimate.memory, estimate.spare_bytes
    params = {knob: candidate[knob] if candidate[knob] in each.choices else _OTHER for knob, each in space.items()}
    known = {_CANDIDATE: encode(candidate)}
    if memory is None or spare_bytes is None:
        return optuna.trial.create_trial(
            state=TrialState.FAIL,
            params=params,
            distributions={**space},
            user_attrs={**known, _REASON: estimate.reason},
        )
    return optuna.trial.create_trial(
        value=estimate.tokens_per_second or 0.0,
        params=params,
        distributions={**space},
        user_attrs={**known, _NEED: memory.device_bytes},
        constraints={_NEED: -spare_bytes / max(1, memory.device_bytes + spare_bytes)},
    )
