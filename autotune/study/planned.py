"""The search by traces: runs the candidates that `Improvements` proposes, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, Runner
from autotune.study.improvement import Improvements
from autotune.study.problem import Problem

MOST_TRACED = 100
"""Most candidates that a plan traces. A trace of an 8B shape takes 0.4 to 0.7 s of one core, and a candidate two to six
of them."""
_FIRST = 4
"""Candidates that are run at first, so that there is a ranking after a few seconds."""


@dataclass(frozen=True)
class TracedSearch:
    """The result of a search by traces.

    Attributes:
        traced: number of candidates that were run.
        finished: whether no further change was worth a trace; else a limit ended the search.
    """

    traced: int
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
    proposals = Improvements(problem, known, starts).proposals()
    left: list[Candidate] = []
    while goes_on():
        most = min(limit - len(known), at_once, _FIRST - len(known) if len(known) < _FIRST else at_once)
        if most <= 0:
            break
        left = left or list(next(proposals, ()))
        if not left:
            return TracedSearch(len(known), finished=True)
        batch, left = left[:most], left[most:]
        known.update({estimate.candidate: estimate for estimate in runner.run(batch)})
    return TracedSearch(len(known), finished=False)
