"""Widens a problem of which nothing fits by what offloads to the host, as a last resort."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.app.problem import with_last_resorts
from autotune.core.status import OUT_OF_MEMORY
from autotune.planning.last_resort import last_resorts, nothing_fits
from autotune.planning.planner import Planner
from autotune.space import SpaceFile
from autotune.study import SearchOutcome
from autotune.techniques import find
from autotune.trainers.problem import TrainerProblem

OFFLOADED = (
    "Nothing is predicted to fit without offloading to the host, so ZeRO-2 and ZeRO-3 with offload were looked at too."
    " Where the optimizer runs on the host, no speed is predicted: such candidates rank last."
)
"""What a plan with last resorts is about."""
_USUAL = {"sharding": "zero2", "offload": "optimizer"}
# Candidates that a search tries first.
_TRIED = 3


def with_what_offloads(problem: TrainerProblem, planner: Planner, file: SpaceFile) -> tuple[TrainerProblem, Planner]:
    """Return the problem and its planner, with last resorts if nothing is predicted to fit without.

    Those that are predicted to fit become recipes, so that a search tries them first.

    Raises:
        AutotuneError: traces cannot be run.
    """
    # A GPU has another memory to offload to.
    if problem.setting.machine.hardware.kind == "cpu" or problem.setting.last_resorts or not nothing_fits(planner):
        return problem, planner
    wide = with_last_resorts(problem, file)
    if wide is None:
        return problem, planner
    further = last_resorts(planner, problem, wide)
    if not further:
        return replace(problem, space=replace(problem.space, left_out=wide.space.left_out)), planner
    found = planner.widened(wide, further)
    new = set(further)
    found.refine(lambda ranked: [each for each in ranked if each.fits and each.candidate in new][:_TRIED], len(new))
    best = [each.candidate for each in found.ranked() if each.fits and each.candidate in new][:_TRIED]
    space = replace(wide.space, recipes=(*best, *wide.space.recipes))
    return replace(wide, space=space), found


def as_searched(problem: TrainerProblem, outcome: SearchOutcome, file: SpaceFile) -> TrainerProblem:
    """Return the problem of a study's candidates, with last resorts if another worker or an earlier run had them.

    Whether a run adds them depends on how much it could trace. A run without them repeats such candidates, compares and
    confirms them as its own, since their plans are the same, and does not propose further ones.
    """
    wide = with_last_resorts(problem, file)
    if wide is None:
        return problem
    added = {
        (knob, choice)
        for knob, choices in wide.choices.items()
        for choice in choices
        if choice not in problem.choices[knob]
    }
    known = any(not added.isdisjoint(record.candidate.items()) for record in outcome.records)
    return wide if known else problem


def notes_on_untried(problem: TrainerProblem, outcome: SearchOutcome, file: SpaceFile) -> Iterator[str]:
    """Yield that a search in which all probes ran out of memory did not try what offloads to the host.

    It is not tried within the search: after the first probe, the choices of a search stay as they are.

    Args:
        problem: as :func:`as_searched` returns it.
    """
    setting = problem.setting
    failed = [record for record in outcome.records if record.probed and record.measurement.status in OUT_OF_MEMORY]
    if outcome.winner is not None or not failed or setting.last_resorts or setting.machine.hardware.kind == "cpu":
        return
    wide = with_last_resorts(problem, file)
    if wide is None:
        return
    absent = [item.reason for item in wide.space.left_out if _USUAL.get(item.knob) == item.choice]
    if not absent and not all(choice in wide.choices.get(knob, ()) for knob, choice in _USUAL.items()):
        return
    words = " ".join(f"--fix {knob}={choice}" for knob, choice in _USUAL.items())
    yield (
        "Nothing that was probed fits, and offloading by ZeRO was not tried: a search does so only where nothing else"
        f" is predicted to fit, before its first probe. Search with {words}{f' ({absent[0]})' if absent else ''}."
    )


def notes_on_offloading(problem: TrainerProblem) -> Iterator[str]:
    """Yield that a problem has last resorts."""
    setting = problem.setting
    if setting.machine.hardware.processes > 1 or not setting.last_resorts or setting.base is not None:
        return
    if len(problem.choices[find("sharding", problem.trainer.techniques).name]) > 1:
        yield OFFLOADED
