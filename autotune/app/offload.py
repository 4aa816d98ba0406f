"""Adds candidates that offload to the host to a problem in which nothing else is predicted to fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autotune.app.problem import with_last_resorts
from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.estimate import Estimate, MemoryEstimate, rank_key
from autotune.core.status import OUT_OF_MEMORY
from autotune.planning.evaluator import Evaluator
from autotune.study.problem import SearchOutcome
from autotune.techniques import find
from autotune.techniques.offload import BOTH, OPTIMIZER, PARAMETERS
from autotune.trainers.problem import TrainerProblem

OFFLOADED = (
    "Nothing is predicted to fit without offloading to the host, so ZeRO-2 and ZeRO-3 with offload were traced, too."
    " Where the optimizer runs on the host, no speed is predicted: such candidates rank last."
)
"""The note of a plan with last resorts."""
_SUGGESTED = {"sharding": "zero2", "offload": "optimizer"}
# Candidates that a search tries first.
_MAX_RECIPES = 3
_MAX_PER_COMBINATION = 2
"""Most candidates tried with each combination of further choices; each is tried only if the previous did not fit."""


def with_last_resorts_if_nothing_fits(evaluator: Evaluator, *, decided: bool = True) -> Evaluator:
    """Return the evaluator, with last resorts in its problem if no candidate without them is predicted to fit.

    Last resorts that are predicted to fit become recipes, so that a search tries them first.

    Args:
        decided: whether the search without last resorts was complete; otherwise an untraced candidate may fit.

    Raises:
        AutotuneError: traces cannot be run.
    """
    problem, ranked = evaluator.problem, evaluator.ranked()
    # A CPU's memory is the host's: offloading frees nothing.
    if problem.setting.machine.hardware.kind == "cpu" or problem.setting.last_resorts or not decided:
        return evaluator
    if any(estimate.fits for estimate in ranked) or not any(estimate.memory is not None for estimate in ranked):
        return evaluator
    wide = with_last_resorts(problem)
    if wide is problem:
        return evaluator
    further = _last_resorts(ranked, problem, wide, evaluator.budget_bytes)
    if not further:
        left = replace(problem, space=replace(problem.space, left_out=wide.space.left_out))
        return evaluator.for_problem(left)
    widened = evaluator.for_problem(wide)
    fitting = sorted(_trace_until_fitting(widened, further), key=rank_key)
    space = replace(wide.space, recipes=(*(each.candidate for each in fitting[:_MAX_RECIPES]), *wide.space.recipes))
    return widened.for_problem(replace(wide, space=space))


def _last_resorts(
    ranked: Sequence[Estimate], narrow: TrainerProblem, wide: TrainerProblem, budget_bytes: int
) -> list[list[Candidate]]:
    """Return the candidates that need the least memory with each combination of the wider problem's further choices.

    Candidates whose memory exceeds the budget even after offloading are excluded.
    """
    found: list[list[Candidate]] = []
    for further in _further(narrow, wide):
        every = ((_with_choices(each.candidate, further, wide), each.memory) for each in ranked)
        legal = ((candidate, memory) for candidate, memory in every if candidate is not None and memory is not None)
        lightest = list(itertools.islice(legal, _MAX_PER_COMBINATION))
        if lightest:
            found.append([each for each, memory in lightest if _least_bytes(each, memory) <= budget_bytes])
    return found


def _least_bytes(candidate: Candidate, memory: MemoryEstimate) -> int:
    """Return a lower bound of the memory that offloading leaves on the device, in bytes.

    A single process shards nothing: weights and optimizer state stay on the device unless they are offloaded. They take
    at least half of the bytes traced without DeepSpeed, which may keep 32-bit values in 16 bits.

    Args:
        memory: memory of the same candidate without offloading.
    """
    offloading = {"parameter": (PARAMETERS, BOTH), "optimizer state": (OPTIMIZER, BOTH)}
    kept = (part for part, by in offloading.items() if candidate["offload"] not in by)
    return sum(memory.breakdown.get(part, 0) for part in kept) // 2


def _trace_until_fitting(evaluator: Evaluator, resorts: Sequence[Sequence[Candidate]]) -> list[Estimate]:
    """Trace candidates of each combination until one fits, and return those that do."""
    fitting: list[Estimate] = []
    left = [each for each in resorts if each]
    while left:
        found = evaluator.run([first for first, *_ in left])
        fitting += [each for each in found if each.fits]
        left = [rest for (_, *rest), each in zip(left, found, strict=True) if rest and not each.fits]
    return fitting


def _further(narrow: TrainerProblem, wide: TrainerProblem) -> Iterator[Mapping[str, Choice]]:
    """Yield the combinations of choices of the knobs with more choices in the wider problem."""
    added = [knob for knob, choices in wide.choices.items() if choices != narrow.choices[knob]]
    for chosen in itertools.product(*(wide.choices[knob] for knob in added)):
        further = dict(zip(added, chosen, strict=True))
        if any(choice not in narrow.choices[knob] for knob, choice in further.items()):
            yield further


def _with_choices(candidate: Candidate, further: Mapping[str, Choice], wide: TrainerProblem) -> Candidate | None:
    """Return a candidate with further choices, or None if they are illegal there."""
    found = wide.normal(candidate.but(**further))
    if any(found[knob] != choice for knob, choice in further.items()):
        return None
    return found if wide.illegal(found) is None else None


def as_searched(problem: TrainerProblem, outcome: SearchOutcome) -> TrainerProblem:
    """Return the problem of a study's candidates, with last resorts if another worker or an earlier run added them.

    Whether a run adds them depends on how much it could trace. A run without them can repeat, compare and confirm such
    candidates, since their plans are the same, but proposes no further ones.
    """
    wide = with_last_resorts(problem)
    added = {
        (knob, choice)
        for knob, choices in wide.choices.items()
        for choice in choices
        if choice not in problem.choices[knob]
    }
    known = any(not added.isdisjoint(record.candidate.items()) for record in outcome.records)
    return wide if known else problem


def notes_on_untried(problem: TrainerProblem, outcome: SearchOutcome) -> Iterator[str]:
    """Yield a note if all probes of a search ran out of memory and no offloading candidate was tried.

    The search itself cannot add such candidates: its choices are fixed after the first probe.

    Args:
        problem: as :func:`as_searched` returns it.
    """
    setting = problem.setting
    failed = [record for record in outcome.records if record.probed and record.measurement.status in OUT_OF_MEMORY]
    if outcome.winner is not None or not failed or setting.last_resorts or setting.machine.hardware.kind == "cpu":
        return
    wide = with_last_resorts(problem)
    if wide is problem:
        return
    absent = [item.reason for item in wide.space.left_out if _SUGGESTED.get(item.knob) == item.choice]
    if not absent and not all(choice in wide.choices.get(knob, ()) for knob, choice in _SUGGESTED.items()):
        return
    words = " ".join(f"--fix {knob}={choice}" for knob, choice in _SUGGESTED.items())
    yield (
        "No probe fits, and ZeRO offloading was not tried: a search tries it only if nothing else is predicted to fit"
        f" before its first probe. Search with {words}{f' ({absent[0]})' if absent else ''}."
    )


def notes_on_offloading(problem: TrainerProblem) -> Iterator[str]:
    """Yield a note if a problem has last resorts."""
    setting = problem.setting
    if setting.machine.hardware.processes > 1 or not setting.last_resorts or setting.base is not None:
        return
    if len(problem.choices[find("sharding", problem.trainer.techniques).name]) > 1:
        yield OFFLOADED
