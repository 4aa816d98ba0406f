"""The report about a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.core.estimate import Estimate, MemoryEstimate, Plan, distinct
from autotune.reporting import document as doc
from autotune.reporting.comparison import compared_row
from autotune.reporting.explanation import explanation_report
from autotune.reporting.outlook import allow_lines, left_out_lines
from autotune.reporting.plan_words import (
    BASIS,
    basis_lines,
    candidate_counts_text,
    change_text,
    choices_text,
    doubt_text,
    headline,
    target_text,
    traces_text,
    unknown_lines,
    way_out_lines,
)
from autotune.reporting.sections import closing, command_again, compared_section, histogram, short
from autotune.reporting.steps import Step, untraced_text
from autotune.reporting.words import BASELINE_NAME, MISSING, bytes_or_dash, memory_cells, number_or_dash, rate_or_dash
from autotune.units import format_bytes

_MOST_ROWS = (250, 150, 50)
"""Most rows of a page that fit, do not fit, and are unknown. A plan may have tens of thousands of candidates; the
document of ``--json`` has all."""
_GRID = 80
"""Columns and rows of a grid over the chart; of the candidates in one cell, one is drawn."""
# PyTorch's memory categories in the order of training, then those of the allocator and the driver.
_CATEGORIES = (
    "parameter", "buffer", "gradient", "optimizer state", "activation", "temporary", "rounding", "fragmentation",
    "context", "process",
)  # fmt: skip
_OTHER = "other"
_SMALLEST_SHARE = 1e-3
_CROWDED = 1 / 3


def plan_report(plan: Plan, top: int | None = None) -> doc.Document:
    """Return the report about a plan.

    Where the plan explains an estimate, its stages take the place of the candidates.

    Args:
        top: number of the best candidates that a terminal shows; a page has as many as are useful.
    """
    if plan.explanation is not None and top is not None:
        return explanation_report(plan.explanation, plan)
    best, fits = plan.best, plan.fastest is not None
    chosen = "fastest that fits" if fits or best is None else "least memory"
    subject = "the fastest that fits" if fits or best is None else "what needs the least"
    steps, untraced = _steps(plan, chosen)
    legend = (("recommended", chosen), ("default", BASELINE_NAME), ("other", "other candidates"))
    plane = doc.Plane(_points(plan), plan.budget_bytes, legend, "memory needed")
    length = best.candidate.get("max_length") if best is not None else None
    lengths = histogram(plan.lengths, length if isinstance(length, int) else None, subject)
    return doc.Document(
        title=f"{plan.trainer}: {short(plan.model)} on {short(plan.dataset)}, planned for {plan.gpu.name}",
        subject=target_text(plan),
        verdict=_verdict(plan, *(["Nothing was measured."] if top is None else [])),
        sections=(
            *doc.listing("What might change this (not predicted)", () if fits else way_out_lines(plan)),
            *compared_section(BASELINE_NAME, chosen, _compared(plan), doc.Medium.PAGES),
            doc.Section("Charts", (doc.Charts(plane, steps, untraced, lengths=lengths),), doc.Medium.PAGES),
            doc.Section("Nothing needs less memory and is as fast", (plane,), doc.Medium.PAGES),
            doc.Section("Candidates", (_candidates(plan, top),)),
            *_breakdown(plan, best),
            *doc.listing("Left out", left_out_lines(plan.left_out)),
            *doc.listing("Not traced, since it changes training", allow_lines(plan.unlockable) if fits else ()),
            *doc.listing("Notes", plan.notes),
            closing("Predicted with", _facts(plan), "Plan again with", command_again("plan", plan.settings)),
        ),
    )


def _verdict(plan: Plan, *remarks: str) -> doc.Verdict:
    best, doubt = plan.best, doubt_text(plan)
    return doc.Verdict(
        headline(plan),
        doc.Tone.BAD if plan.fastest is None else doc.Tone.GOOD,
        choices=choices_text(best.candidate, plan) if best is not None and len(plan.estimates) > 1 else "",
        remarks=(*map(doc.Paragraph, remarks), *([doc.Paragraph(doubt, doc.Tone.UNSURE)] if doubt else [])),
    )


def _steps(plan: Plan, chosen: str) -> tuple[tuple[Step, ...], str]:
    """Return the memory through one step of the compared candidates, and why it is missing for one of them."""
    best = plan.best
    compared = [("recommended", chosen, plan.timeline)] if best is not None else []
    if best is None or best.candidate != plan.baseline.candidate:
        compared.append(("default", BASELINE_NAME, plan.baseline_timeline))
    untraced = untraced_text((name for _, name, timeline in compared if timeline is None), predicted=True)
    return tuple(Step(role, name, timeline) for role, name, timeline in compared if timeline is not None), untraced


def _compared(plan: Plan) -> tuple[tuple[doc.Cell, ...], ...]:
    best = plan.best
    if best is None:
        return ()
    both = (best, plan.baseline)
    memories = [one.memory for one in both]
    needs = [memory.device_bytes if memory is not None else None for memory in memories]
    texts = list(zip(*map(memory_cells, both), strict=True))
    rates = [one.tokens_per_second for one in both]
    fastest = max((rate for rate in rates if rate is not None), default=0.0)
    shares = [need / plan.budget_bytes if need is not None else None for need in needs]
    speeds = [rate / fastest if rate and fastest else None for rate in rates]
    errors = [f"{100 * memory.error:.0f} %" if memory is not None else MISSING for memory in memories]
    return (
        compared_row("memory needed", *texts[0], *shares),
        compared_row("to spare", *texts[1]),
        compared_row("memory may be off by", errors[0], errors[1]),
        compared_row("host memory of a machine", *texts[2]),
        compared_row("speed", rate_or_dash(rates[0]), rate_or_dash(rates[1]), *speeds),
    )


def _points(plan: Plan) -> tuple[doc.Point, ...]:
    """Return the candidates with their figures: the front, the compared ones, and one of each cluster."""
    known = {estimate.candidate: estimate for estimate in (*plan.estimates, plan.baseline)}
    sized = [
        (estimate, estimate.memory.device_bytes, estimate.tokens_per_second)
        for estimate in known.values()
        if estimate.memory is not None and estimate.tokens_per_second is not None
    ]
    most = max((size for _, size, _ in sized), default=0) or 1
    fastest = max((rate for _, _, rate in sized), default=0.0) or 1.0
    best = doc.front([(size, rate) for _, size, rate in sized])
    roles = {plan.baseline.candidate: "default"} | ({plan.best.candidate: "recommended"} if plan.best else {})
    cells = set[tuple[int, int]]()
    points = []
    for (estimate, size, rate), on_front in zip(sized, best, strict=True):
        role = roles.get(estimate.candidate, "other")
        cell = (size * _GRID // most, int(rate * _GRID / fastest))
        if role != "other" or on_front or cell not in cells:
            cells.add(cell)
            name = choices_text(estimate.candidate, plan)
            points.append(doc.Point(name, BASIS[estimate.origin], size, rate, role, on_front))
    return tuple(points)


def _candidates(plan: Plan, top: int | None) -> doc.Candidates:
    listed = _listed(plan, top)
    numbered = [(str(number), one) for number, one in enumerate(listed, 1)]
    if plan.baseline.candidate not in [one.candidate for one in listed]:
        numbered.append((MISSING, plan.baseline))
    changes = {change.candidate: change_text(change) for change in plan.changes}
    part = f" {len(numbered):,} of them are below." if top is None and len(numbered) < len(plan.estimates) else ""
    shown = [one for _, one in numbered]
    return doc.Candidates(
        counts=f"{candidate_counts_text(plan)}{part}",
        lines=(
            f"{traces_text(plan)}; of candidates that predict the same, one is shown",
            *basis_lines(shown),
            *unknown_lines(plan),
        ),
        number="",
        columns=("needs", "to spare", "host", "tok/s", "basis"),
        last=f"what differs from {BASELINE_NAME}",
        rows=tuple(_row(number, one, plan, changes.get(one.candidate, one.reason)) for number, one in numbered),
        in_terminal=True,
    )


def _listed(plan: Plan, top: int | None) -> tuple[Estimate, ...]:
    if top is not None:
        return distinct(plan.estimates, top)
    kinds = [_outcome(one) for one in plan.estimates]
    return tuple(
        one
        for outcome, most in zip(("fits", "does not fit", "unknown"), _MOST_ROWS, strict=True)
        for one in distinct((one for one, kind in zip(plan.estimates, kinds, strict=True) if kind == outcome), most)
    )


def _outcome(one: Estimate) -> str:
    return "unknown" if one.memory is None else "fits" if one.fits else "does not fit"


def _row(number: str, one: Estimate, plan: Plan, reason: str) -> doc.CandidateRow:
    cells = (*memory_cells(one), number_or_dash(one.tokens_per_second), BASIS[one.origin])
    tone = doc.Tone.PLAIN if one.fits else doc.Tone.BAD
    return doc.CandidateRow(number, choices_text(one.candidate, plan), _outcome(one), cells, reason, tone)


def _breakdown(plan: Plan, best: Estimate | None) -> Iterator[doc.Section]:
    """Yield the memory at the peak of the best candidate and the baseline by category; a page has it as a chart."""
    memories = {} if best is None else {"fastest" if best.fits else "least": best.memory}
    if best is None or best.candidate != plan.baseline.candidate:
        memories["default"] = plan.baseline.memory
    known = {name: memory for name, memory in memories.items() if memory is not None}
    if not known:
        return
    needs = [memory.device_bytes for memory in known.values()]
    # For sizes far below the budget, bars relative to the budget would be empty.
    crowded = max(needs) <= plan.budget_bytes * _CROWDED
    scale_bytes = max(needs) if crowded else max(plan.budget_bytes, *needs)

    parts = _parts(list(known.values()))
    total = len(parts)
    parts["needs"] = needs
    if not crowded and plan.budget_bytes <= scale_bytes:
        parts["of"] = [plan.budget_bytes] * len(known)
    columns = ("memory at peak", *(title for name in known for title in (name, "")))
    rows = tuple((name, *_cells(sizes, scale_bytes)) for name, sizes in parts.items())
    yield doc.Section("Memory at the peak", (doc.Table(columns, rows, total=total),), doc.Medium.TERMINAL)


def _cells(sizes: Sequence[int], scale_bytes: int) -> Iterator[doc.Cell]:
    for size, role in zip(sizes, ("recommended", "default"), strict=False):
        yield format_bytes(size) if size else MISSING
        yield doc.Bar(size / scale_bytes, role)


def _parts(memories: Sequence[MemoryEstimate]) -> dict[str, list[int]]:
    """Return the sizes of each estimate by category; categories too small for a row are summed under "other"."""
    found = dict.fromkeys(_CATEGORIES) | dict.fromkeys(name for memory in memories for name in memory.breakdown)
    sizes = {name: [memory.breakdown.get(name, 0) for memory in memories] for name in found}
    small = max(memory.device_bytes for memory in memories) * _SMALLEST_SHARE
    shown = {name: parts for name, parts in sizes.items() if max(parts) >= small and name != _OTHER}
    others = [sum(parts) for parts in zip(*(sizes[name] for name in sizes if name not in shown), strict=True)]
    return {**shown, **({_OTHER: others} if any(others) else {})}


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", plan.model
    yield "dataset", plan.dataset
    number = f"{plan.processes} x " if plan.processes > 1 else ""
    yield "planned for", f"{number}{plan.gpu.name}, {bytes_or_dash(plan.gpu.memory_bytes)} ({plan.gpu.memory_kind})"
    yield from sorted(plan.environment.items())
