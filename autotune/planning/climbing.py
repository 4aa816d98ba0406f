"""Climbs from the best candidates of a sample to better ones outside of it, one choice after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autotune.core.candidate import Candidate, Choice
from autotune.core.estimate import Estimate, rank
from autotune.planning.candidates import is_sampled
from autotune.planning.planner import Planner
from autotune.trainers.problem import TrainerProblem

_ROUNDS = 6
"""Most times that what was climbed to is traced. An 8B shape took one to three on 8 H100 and on 2 T4."""
_AT_ONCE = 4
"""Most candidates that are traced in a round, which takes 5 to 30 s for an 8B shape on 2 cores."""
_WORTH = 0.01
"""Share of memory or speed by which a candidate has to promise more than the best to be traced."""


def climb(
    problem: TrainerProblem,
    planner: Planner,
    *,
    at_once: int = _AT_ONCE,
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[Candidate, ...]:
    """Add to the planner, and trace, what promises more than its best candidate, until nothing does; return that.

    Nothing is added where the planner's candidates are all of the space.

    Args:
        planner: has explored its candidates.
        at_once: most candidates that are traced between two calls of ``goes_on``.
        goes_on: returns whether to continue.
    """
    added: list[Candidate] = []
    if not is_sampled(problem):
        return ()
    for _ in range(_ROUNDS):
        planner.refine(lambda ranked: ranked[:1], at_once, goes_on=goes_on)
        best = next(iter(planner.traced(1)), None)
        if best is None or not goes_on():
            break
        ends = {end.candidate: end for end in _ends(problem, planner)}
        further = [end.candidate for end in sorted(ends.values(), key=rank) if _better(end, best)][:at_once]
        if not further:
            break
        added += further
        planner.add(further)
    return tuple(added)


def _ends(problem: TrainerProblem, planner: Planner) -> Iterator[Estimate]:
    """Yield estimates that no change of one choice makes better: where the best candidate with each choice leads to."""
    best: dict[tuple[str, Choice], Estimate] = {}
    for estimate in planner.ranked():
        for level in estimate.candidate.items():
            best.setdefault(level, estimate)
    starts = {estimate.candidate: estimate for estimate in best.values()}
    for start in starts.values():
        here = start
        while (further := _next(problem, planner, here)) is not None:
            here = further
        yield here


def _next(problem: TrainerProblem, planner: Planner, here: Estimate) -> Estimate | None:
    """Return the best of the candidates that differ in one choice and what follows from it; None: none is better."""
    changed = (
        problem.normal(here.candidate.but(**{knob: choice}))
        for knob, choices in problem.choices.items()
        for choice in choices
        if choice != here.candidate[knob]
    )
    legal = (candidate for candidate in changed if problem.illegal(candidate) is None)
    best = min(map(planner.estimate, legal), key=rank, default=here)
    return best if rank(best) < rank(here) else None


def _better(promised: Estimate, best: Estimate) -> bool:
    """Return whether an estimate is better than another by a share that is worth a trace."""
    if promised.fits and best.fits and promised.tokens_per_second and best.tokens_per_second:
        return promised.tokens_per_second > best.tokens_per_second * (1 + _WORTH)
    if promised.fits or best.fits or promised.memory is None or best.memory is None:
        return rank(promised) < rank(best)
    return promised.memory.device_bytes < best.memory.device_bytes * (1 - _WORTH)
