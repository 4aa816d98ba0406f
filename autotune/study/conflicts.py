"""Finds legal neighbours of a candidate: one other choice, with the fewest further changes that make it legal."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.candidate import Candidate, Choice
from autotune.study.problem import Problem

_MAX_CHANGES = 3
"""Maximum number of further knobs changed for one choice: ``context_parallel`` needs changes of ``sharding``,
``pad_to_multiple_of`` and the rows of a micro-batch."""
_MAX_EXPANDED = 24
"""Maximum number of illegal candidates per distance that are expanded."""


def legal_changes(problem: Problem, candidate: Candidate) -> tuple[Candidate, ...]:
    """Return the legal candidates with one other choice, and with further changes if rules forbid that choice alone."""
    singles = ((knob, choice) for knob, each in problem.choices.items() for choice in each if choice != candidate[knob])
    return tuple(dict.fromkeys(each for single in singles for each in nearest_legal(problem, candidate, *single)))


def next_smaller(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with the next smaller choice of each ordered knob that has one."""
    for knob, choices in problem.choices.items():
        current = candidate[knob]
        if knob in problem.ordered and isinstance(current, int):
            smaller = [each for each in choices if isinstance(each, int) and each < current]
            if smaller:
                yield candidate.but(**{knob: max(smaller)})


def nearest_legal(problem: Problem, original: Candidate, knob: str, choice: Choice) -> tuple[Candidate, ...]:
    """Return the legal candidates with a choice that differ from ``original`` in the fewest other knobs.

    A further change of a knob in conflict is kept if it makes the candidate legal, or changes the violated rule.
    """
    start = problem.normal(original.but(**{knob: choice}))
    if start[knob] != choice:
        return ()
    if problem.illegal(start) is None:
        return (start,)
    seen, frontier = {start}, [start]
    for _ in range(_MAX_CHANGES):
        legal: dict[Candidate, None] = {}
        next_frontier: list[Candidate] = []
        for candidate in frontier[:_MAX_EXPANDED]:
            reason = problem.illegal(candidate)
            for other in _neighbours(problem, candidate, knob):
                if other[knob] != choice or other in seen:
                    continue
                seen.add(other)
                other_reason = problem.illegal(other)
                if other_reason is None:
                    legal[other] = None
                elif other_reason != reason:
                    next_frontier.append(other)
        if legal:
            return tuple(legal)
        frontier = next_frontier
    return ()


def _neighbours(problem: Problem, candidate: Candidate, fixed: str) -> Iterator[Candidate]:
    """Yield variants of an illegal candidate with one other choice of a knob in conflict, except ``fixed``."""
    in_conflict = problem.knobs_of_violated_rule(candidate)
    for knob, choices in problem.choices.items():
        if knob != fixed and knob in in_conflict:
            for choice in choices:
                if choice != candidate[knob]:
                    yield problem.normal(candidate.but(**{knob: choice}))
