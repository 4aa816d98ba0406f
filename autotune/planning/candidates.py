"""Selects the candidates to estimate: all legal ones of a small space, a sample of a large one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

from autotune.core.candidate import Candidate
from autotune.planning.enumeration import Enumeration
from autotune.trainers.problem import TrainerProblem

MOST_COMBINATIONS = 300_000
"""Most combinations of choices that are enumerated. The shipped space has millions if everything is allowed."""
_BY_CHANCE = 20_000


def legal_candidates(problem: TrainerProblem) -> tuple[Candidate, ...]:
    """Return every legal candidate of a problem once, in its normal form."""
    return Enumeration(problem).candidates()


def estimated_candidates(problem: TrainerProblem) -> tuple[Candidate, ...]:
    """Return the legal candidates to estimate, each once, in its normal form.

    If there are more than :data:`MOST_COMBINATIONS` combinations, these are the recipes, the candidates that differ
    from the baseline in one choice, and 20,000 drawn at random with a fixed seed.
    """
    if problem.size <= MOST_COMBINATIONS:
        return legal_candidates(problem)
    chance = random.Random(0)
    knobs = problem.choices
    drawn = (Candidate({knob: chance.choice(choices) for knob, choices in knobs.items()}) for _ in range(_BY_CHANCE))
    near = (problem.baseline.but(**{knob: choice}) for knob, choices in knobs.items() for choice in choices)
    return _legal(problem, itertools.chain(problem.recipes, near, drawn))


def _legal(problem: TrainerProblem, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    normal = dict.fromkeys(map(problem.normal, candidates))
    return tuple(candidate for candidate in normal if problem.illegal(candidate) is None)
