"""Widens a problem of which nothing fits by what offloads to the host, as a last resort."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.app.problem import with_last_resorts
from autotune.planning.last_resort import last_resorts, nothing_fits
from autotune.planning.planner import Planner
from autotune.space import SpaceFile
from autotune.techniques import find
from autotune.trainers.problem import TrainerProblem

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
    best = [each.candidate for each in found.ranked() if each.fits and each.candidate in new][:_TRIED]
    space = replace(wide.space, recipes=(*best, *wide.space.recipes))
    return replace(wide, space=space), found


def notes_on_offloading(problem: TrainerProblem) -> Iterator[str]:
    """Yield what a problem with last resorts is about."""
    setting = problem.setting
    if setting.machine.hardware.processes > 1 or not setting.last_resorts or setting.base is not None:
        return
    if len(problem.choices[find("sharding", problem.trainer.techniques).name]) > 1:
        yield (
            "Nothing is predicted to fit without offloading to the host, so ZeRO-2 and ZeRO-3 with offload were looked"
            " at too. Where the optimizer runs on the host, no speed is predicted: such candidates rank last."
        )
