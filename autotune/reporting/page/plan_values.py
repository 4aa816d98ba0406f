"""The values of the page about a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.core.estimate import Estimate, Plan, distinct
from autotune.reporting.comparison import Row
from autotune.reporting.outlook import said_left_out, said_unlockable
from autotune.reporting.page.values import (
    Point,
    Table,
    TableRow,
    Values,
    Words,
    command_again,
    front,
    histogram,
    short,
)
from autotune.reporting.plan_words import (
    BASIS,
    headline,
    said_bases,
    said_change,
    said_choices,
    said_counts,
    said_doubt,
    said_target,
    said_traces,
    said_unknown,
    said_ways_out,
)
from autotune.reporting.steps import Step, said_untraced
from autotune.reporting.words import BASELINE_NAME, MISSING, said_bytes, said_rate

FASTEST = Words("fastest that fits", "the fastest that fits", "memory needed", "Predicted with", "Plan again with")
LEAST = Words("least memory", "what needs the least", "memory needed", "Predicted with", "Plan again with")
_FITTING, _NOT_FITTING, _UNKNOWN = 250, 150, 50
"""Most rows of the table. A plan may have tens of thousands of candidates; the document of ``--json`` has all."""
_CELLS = 80
"""Columns and rows of a grid over the chart; of the candidates in one cell, one is drawn."""


def plan_values(plan: Plan) -> Values:
    """Return what the page of a plan shows."""
    best, baseline, shown = plan.best, plan.baseline, plan.estimates
    words = FASTEST if plan.fastest is not None or best is None else LEAST
    same = best is not None and best.candidate == baseline.candidate
    default = [] if same else [("default", BASELINE_NAME, plan.baseline_timeline)]
    compared = [*([("recommended", words.chosen, plan.timeline)] if best is not None else []), *default]
    length = best.candidate.get("max_length") if best is not None else None
    return Values(
        words=words,
        title=f"{plan.trainer}: {short(plan.model)} on {short(plan.dataset)}, planned for {plan.gpu.name}",
        verdict=f"{headline(plan).rstrip('.')}.",
        good=plan.fastest is not None,
        choices=said_choices(best.candidate, plan) if best is not None else "",
        remarks=tuple(text for text in (f"{said_target(plan)}. Nothing was measured.", said_doubt(plan)) if text),
        command=None,
        figures=_figures(best, baseline, plan.budget_bytes) if best is not None else (),
        steps=tuple(Step(role, name, timeline) for role, name, timeline in compared if timeline is not None),
        untraced=said_untraced((name for _, name, timeline in compared if timeline is None), predicted=True),
        phases=(),
        points=_points(plan, shown, best),
        budget_bytes=plan.budget_bytes,
        contributions=(),
        edited=None,
        lengths=histogram(plan.lengths, length if isinstance(length, int) else None),
        memory=(),
        speed=(),
        table=_table(plan, shown),
        lists=(
            ("What the estimates stand on", said_bases([*shown, baseline])),
            ("Unknown", said_unknown(plan)),
            ("Notes", plan.notes),
            ("Left out", said_left_out(plan.left_out)),
            (
                "Not looked at, since it changes training",
                said_unlockable(plan.unlockable) if plan.fastest is not None else (),
            ),
            ("What might change this (not predicted)", () if plan.fastest is not None else said_ways_out(plan)),
        ),
        facts=tuple(_facts(plan)),
        repeated=command_again("plan", plan.settings),
    )


def _figures(best: Estimate, baseline: Estimate, budget_bytes: int) -> tuple[Row, ...]:
    both = (best, baseline)
    memories = [one.memory for one in both]
    needs = [memory.device_bytes if memory is not None else None for memory in memories]
    hosts = [memory.host_need_bytes if memory is not None else None for memory in memories]
    rates = [one.tokens_per_second for one in both]
    fastest = max((rate for rate in rates if rate is not None), default=0.0)
    shares = [need / budget_bytes if need is not None else None for need in needs]
    speeds = [rate / fastest if rate and fastest else None for rate in rates]
    errors = [f"{100 * memory.error:.0f} %" if memory is not None else MISSING for memory in memories]
    return (
        Row("memory needed", said_bytes(needs[0]), said_bytes(needs[1]), *shares),
        Row("to spare", said_bytes(best.spare_bytes), said_bytes(baseline.spare_bytes)),
        Row("memory may be off by", errors[0], errors[1]),
        Row("host memory of a machine", said_bytes(hosts[0]), said_bytes(hosts[1])),
        Row("speed", said_rate(rates[0]), said_rate(rates[1]), *speeds),
    )


def _points(plan: Plan, shown: Sequence[Estimate], best: Estimate | None) -> tuple[Point, ...]:
    """Return the candidates with their figures: the front, the compared ones, and one of those that lie together."""
    known = {estimate.candidate: estimate for estimate in (*shown, plan.baseline)}
    sized = [
        (estimate, estimate.memory.device_bytes, estimate.tokens_per_second)
        for estimate in known.values()
        if estimate.memory is not None and estimate.tokens_per_second is not None
    ]
    most = max((size for _, size, _ in sized), default=0) or 1
    fastest = max((rate for _, _, rate in sized), default=0.0) or 1.0
    best_ones = front([(size, rate) for _, size, rate in sized])
    cells = set[tuple[int, int]]()
    points = []
    for (estimate, size, rate), on_front in zip(sized, best_ones, strict=True):
        role = "recommended" if best is not None and estimate.candidate == best.candidate else "other"
        role = "default" if role == "other" and estimate.candidate == plan.baseline.candidate else role
        cell = (size * _CELLS // most, int(rate * _CELLS / fastest))
        if role != "other" or on_front or cell not in cells:
            cells.add(cell)
            points.append(
                Point(said_choices(estimate.candidate, plan), BASIS[estimate.origin], size, rate, role, on_front)
            )
    return tuple(points)


def _table(plan: Plan, shown: Sequence[Estimate]) -> Table:
    fitting = distinct((one for one in shown if one.fits), _FITTING)
    others = distinct((one for one in shown if one.memory is not None and not one.fits), _NOT_FITTING)
    unknown = distinct((one for one in shown if one.memory is None), _UNKNOWN)
    listed = [(str(number), one) for number, one in enumerate((*fitting, *others, *unknown), 1)]
    if plan.baseline.candidate not in [one.candidate for _, one in listed]:
        listed.append((MISSING, plan.baseline))
    changes = {change.candidate: said_change(change) for change in plan.changes}
    part = f" {len(listed):,} of them are below." if len(listed) < len(plan.estimates) else ""
    rows = (_row(number, one, plan, changes.get(one.candidate, one.reason)) for number, one in listed)
    return Table(
        title="Candidates",
        said=f"{said_counts(plan)} {said_traces(plan)}.{part} Of those that predict the same, one is shown.",
        number="",
        columns=("needs", "to spare", "host", "tok/s", "basis"),
        last="candidate, and what makes it fit",
        rows=tuple(rows),
    )


def _row(number: str, one: Estimate, plan: Plan, reason: str) -> TableRow:
    memory = one.memory
    outcome = "unknown" if memory is None else "fits" if one.fits else "does not fit"
    cells = (
        said_bytes(memory.device_bytes if memory is not None else None),
        said_bytes(one.spare_bytes),
        said_bytes(memory.host_need_bytes if memory is not None else None),
        said_rate(one.tokens_per_second),
        BASIS[one.origin],
    )
    return TableRow(number, said_choices(one.candidate, plan), outcome, cells, reason)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", plan.model
    yield "dataset", plan.dataset
    number = f"{plan.processes} x " if plan.processes > 1 else ""
    yield "planned for", f"{number}{plan.gpu.name}, {said_bytes(plan.gpu.memory_bytes)} ({plan.gpu.memory_kind})"
    yield from sorted(plan.environment.items())
