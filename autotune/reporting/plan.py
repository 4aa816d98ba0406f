"""``autotune plan`` in a terminal: the fastest that fits, the candidates, and a breakdown of their memory."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from autotune.core.estimate import Plan, distinct
from autotune.reporting.copied import show
from autotune.reporting.explanation import drawn_explanation
from autotune.reporting.listing import listing
from autotune.reporting.outlook import said_left_out, said_unlockable
from autotune.reporting.plan_tables import breakdown, candidates
from autotune.reporting.plan_words import (
    headline,
    said_bases,
    said_choices,
    said_counts,
    said_doubt,
    said_target,
    said_traces,
    said_unknown,
    said_ways_out,
    smallest,
)


def show_plan(plan: Plan, console: Console, top: int) -> None:
    """Print a plan, with the ``top`` best candidates."""
    for part in drawn_plan(plan, console.width, top):
        show(part, console)


def drawn_plan(plan: Plan, width: int, top: int) -> Iterable[RenderableType]:
    """Return the parts of a plan for a console of ``width`` characters, top to bottom.

    Where the plan explains an estimate, its stages take the place of the candidates.
    """
    rows = distinct(plan.estimates, top)
    yield Text(said_target(plan))
    yield Text()
    if plan.explanation is not None:
        yield from drawn_explanation(plan.explanation, plan)
        yield listing("Notes", plan.notes)
        return
    yield from _found(plan)
    yield from candidates(plan, rows, width)
    yield from breakdown(plan, width)
    shown = [*said_bases([*rows, plan.baseline]), *said_unknown(plan)]
    yield listing(said_counts(plan), [said_traces(plan), *shown])
    yield listing("Left out", said_left_out(plan.left_out))
    if plan.fastest is not None:
        yield listing("Not looked at, since it changes training", said_unlockable(plan.unlockable))
    yield listing("Notes", plan.notes)


def _found(plan: Plan) -> Iterable[RenderableType]:
    best = plan.fastest or smallest(plan)
    yield Text(headline(plan), style="bold green" if plan.fastest is not None else "bold red")
    if best is not None and len(plan.estimates) > 1:
        words = Text(said_choices(best.candidate, plan), style="bold")
        yield Padding(words, (0, 0, 0, 2), expand=False)
    if plan.fastest is None:
        yield listing("What might change this (not predicted)", said_ways_out(plan))
        return
    doubt = said_doubt(plan)
    if doubt:
        yield Text(doubt, style="yellow")
