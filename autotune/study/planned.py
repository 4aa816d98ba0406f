"""The Optuna study of traces: runs the candidates that the ascent proposes, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from autotune.core.candidate import Candidate
from autotune.core.codec import encode
from autotune.core.estimate import Estimate
from autotune.core.runner import Runner
from autotune.study.ascent import Ascent
from autotune.study.problem import Problem

MOST_TRACED = 100
"""Most candidates that a plan traces. A trace of an 8B shape takes 0.4 to 0.7 s of one core, and a candidate two to six
of them."""
_FIRST = (1, 3)
"""Candidates that are run at first, so that there is a ranking after a few seconds."""
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
    """Run candidates of a problem until no change of one or two choices improves the best, or a limit is reached.

    Args:
        starts: candidates that are run first, beside the baseline; None: the recipes.
        limit: most candidates that are run.
        at_once: most of them between two calls of ``goes_on``.
        goes_on: returns whether to continue.

    Raises:
        AutotuneError: the runner cannot run anything.
    """
    known: dict[Candidate, Estimate] = {}
    # Normal forms may have choices that are not in the space.
    always = (problem.baseline, *problem.recipes)
    space: dict[str, BaseDistribution] = {
        knob: CategoricalDistribution(tuple(dict.fromkeys((*choices, *(each[knob] for each in always)))))
        for knob, choices in problem.choices.items()
    }
    proposals, proposed = Ascent(problem, known, starts).proposals(), list[Candidate]()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    sizes = list(_FIRST)
    while goes_on():
        most = min(limit - len(known), at_once, sizes.pop(0) if sizes else at_once)
        if most <= 0:
            break
        proposed = proposed or list(next(proposals, ()))
        if not proposed:
            return TracedSearch(study, finished=True)
        batch, proposed = proposed[:most], proposed[most:]
        for candidate in batch:
            study.enqueue_trial({knob: candidate[knob] for knob in space})
        trials = [study.ask(space) for _ in batch]
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
