"""Selects candidates with choices that are for where nothing else fits: few, on top of what needs the least memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.estimate import Estimate, Origin
from autotune.planning.planner import Planner
from autotune.trainers.problem import TrainerProblem

_EACH = 2
"""Technique combinations that each of the further choices is tried with: offloading has no predicted speed, so that of
several that fit the one that needs the least memory is shown first."""


def nothing_fits(planner: Planner) -> bool:
    """Return whether memory was estimated, and no candidate is predicted to fit, with more traces either.

    Where tracing was cut short, some candidates have no estimate yet, and one of them may fit. Those that cannot be
    traced do not count. What seems to fit, or is the nearest to it, is traced at its own sizes first.
    """
    planner.refine(lambda found: [each for each in found[:1] if each.memory is not None], 1)
    ranked = planner.ranked()
    if any(found.fits for found in ranked) or not any(found.origin is Origin.TRACED for found in ranked):
        return False
    return not planner.cut_short or not any(_lacks_traces(planner, found) for found in ranked)


def _lacks_traces(planner: Planner, found: Estimate) -> bool:
    """Return whether further traces might give an estimate to a candidate that has none."""
    if found.origin is not Origin.UNKNOWN or planner.group(found.candidate) in planner.untraceable:
        return False
    # One of which the training is known, and not what vLLM takes beside it, lacks no trace.
    return planner.figures.training(found.candidate) is None


def last_resorts(planner: Planner, narrow: TrainerProblem, wide: TrainerProblem) -> tuple[Candidate, ...]:
    """Return candidates of a wider problem that are worth a trace where nothing of a narrower one fits.

    Args:
        planner: of the narrower problem, whose candidates have been estimated.
        wide: the same problem with further choices.
    """
    ranked = planner.ranked()
    found: dict[Candidate, None] = {}
    for further in _further(narrow, wide):
        kept: dict[object, None] = {}
        for estimate in ranked:
            group = planner.group(estimate.candidate)
            if group in kept or len(kept) == _EACH:
                continue
            if _with(estimate, further, wide) is not None:
                kept[group] = None
        ways = (_with(estimate, further, wide) for estimate in ranked if planner.group(estimate.candidate) in kept)
        found.update(dict.fromkeys(way for way in ways if way is not None))
    return tuple(found)


def _further(narrow: TrainerProblem, wide: TrainerProblem) -> Iterator[Mapping[str, Choice]]:
    """Yield the combinations of choices of the knobs that the wider problem has more choices of."""
    added = [knob for knob, choices in wide.choices.items() if choices != narrow.choices[knob]]
    for chosen in itertools.product(*(wide.choices[knob] for knob in added)):
        further = dict(zip(added, chosen, strict=True))
        if any(choice not in narrow.choices[knob] for knob, choice in further.items()):
            yield further


def _with(estimate: Estimate, further: Mapping[str, Choice], wide: TrainerProblem) -> Candidate | None:
    """Return the candidate of an estimate with further choices, or None where they are illegal there."""
    candidate = wide.normal(estimate.candidate.but(**further))
    if any(candidate[knob] != choice for knob, choice in further.items()):
        return None
    return candidate if wide.illegal(candidate) is None else None
