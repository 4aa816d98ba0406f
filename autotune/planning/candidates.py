"""Selects the candidates to estimate: all legal ones of a small space, a sample of a large one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

from autotune.core.candidate import Candidate, Choice
from autotune.planning.additive.group import techniques_of
from autotune.planning.enumeration import Enumeration
from autotune.techniques.traits import size_knobs
from autotune.trainers.problem import TrainerProblem

MOST_COMBINATIONS = 300_000
"""Most combinations of choices that are enumerated. The shipped space has millions if everything is allowed, and with
several processes."""
_STEPS = 20_000
"""Changes of one choice that the sample of a larger space is made by."""
_WALK = 24
"""Changes after which a walk starts anew, from near the baseline."""
_TECHNIQUES = 1_200
"""Most combinations of techniques in a sample, whatever their sizes: estimates are compared among all of them."""
_TOGETHER = 3
"""Most knobs that are changed together to reach a choice: rows that are split take ``sharding`` and
``pad_to_multiple_of`` beside ``context_parallel``."""


def legal_candidates(problem: TrainerProblem) -> tuple[Candidate, ...]:
    """Return every legal candidate of a problem once, in its normal form."""
    return Enumeration(problem).candidates()


def is_sampled(problem: TrainerProblem) -> bool:
    """Return whether the space is too large for all of its candidates to be looked at."""
    return problem.size > MOST_COMBINATIONS


def estimated_candidates(problem: TrainerProblem) -> tuple[Candidate, ...]:
    """Return the legal candidates to estimate, each once, in its normal form.

    If there are more than :data:`MOST_COMBINATIONS` combinations, these are a sample with a fixed seed: the recipes;
    the candidates that differ in one or two choices, or in as many as a choice takes to be legal, from the baseline, or
    from the legal candidate most like it where it cuts more of the rows than was asked for; each of them at each size;
    and what walks from there come to, one choice after another. So each choice has candidates that differ in it alone,
    which show its effect.
    """
    if not is_sampled(problem):
        return legal_candidates(problem)
    centre = next(_changed(problem, problem.baseline, range(_TOGETHER + 1)), problem.baseline)
    near = _legal(problem, (centre, *problem.recipes, *_changed(problem, centre, range(1, _TOGETHER + 1))))
    sizes = _choices_beside(problem, centre, size_knobs() & set(problem.choices))
    sized = _legal(problem, (*near, *(found.but(**dict([size])) for found in near for size in sizes)))
    return tuple(dict.fromkeys((*sized, *_walked(problem, sized))))


def _changed(problem: TrainerProblem, centre: Candidate, counts: Iterable[int]) -> Iterator[Candidate]:
    """Yield legal candidates with up to two choices that are not the centre's, and with more that one of them takes."""
    changes = _choices_beside(problem, centre, problem.choices)
    reached: set[tuple[str, Choice]] = set()
    for count in counts:
        before = frozenset(reached)
        for together in itertools.combinations(changes, count):
            if len({knob for knob, _ in together}) < count or (count > 2 and before.issuperset(together)):
                continue
            candidate = problem.normal(centre.but(**dict(together)))
            kept = all(candidate[knob] == choice for knob, choice in together)
            if kept and problem.illegal(candidate) is None:
                reached.update(together)
                yield candidate


def _choices_beside(problem: TrainerProblem, centre: Candidate, knobs: Iterable[str]) -> list[tuple[str, Choice]]:
    """Return the choices of knobs that are not the centre's."""
    return [(knob, choice) for knob in sorted(knobs) for choice in problem.choices[knob] if choice != centre[knob]]


def _walked(problem: TrainerProblem, starts: tuple[Candidate, ...]) -> Iterator[Candidate]:
    """Yield legal candidates of walks, each step of which changes one choice at random."""
    chance = random.Random(0)
    knobs = [knob for knob, choices in problem.choices.items() if len(choices) > 1]
    techniques = {techniques_of(found) for found in starts}
    here = starts[0] if starts else problem.baseline
    for step in range(_STEPS):
        here = chance.choice(starts) if starts and step % _WALK == 0 else here
        knob = chance.choice(knobs)
        found = problem.normal(here.but(**{knob: chance.choice(problem.choices[knob])}))
        known = techniques_of(found)
        if problem.illegal(found) is None and (known in techniques or len(techniques) < _TECHNIQUES):
            techniques.add(known)
            here = found
            yield found


def _legal(problem: TrainerProblem, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    normal = dict.fromkeys(map(problem.normal, candidates))
    return tuple(candidate for candidate in normal if problem.illegal(candidate) is None)
