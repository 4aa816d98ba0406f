"""The report about a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.core.estimate import ALIKE_MEMORY, ALIKE_SPEED, Estimate, Plan, distinct
from autotune.reporting import document as doc
from autotune.reporting.explanation import explanation_report
from autotune.reporting.outlook import allow_lines, left_out_lines
from autotune.reporting.plan_words import (
    candidate_counts_text,
    change_text,
    choices_text,
    doubt_text,
    headline,
    traces_text,
    unknown_lines,
    way_out_lines,
    workload_and_gpu_text,
)
from autotune.reporting.sections import (
    Value,
    closing,
    command_again,
    compared_section,
    comparison_rows,
    epoch_values,
    lengths_section,
    peak_section,
    short,
    step_memory,
)
from autotune.reporting.words import BASELINE_NAME, MISSING, bytes_or_dash, memory_cells, number_or_dash, rate_or_dash
from autotune.trainers import find_trainer

_ALIKE = f"within {100 * ALIKE_SPEED:.0f} % in speed and {100 * ALIKE_MEMORY:.0f} % in memory"


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
    return doc.Document(
        title=f"{plan.trainer}: {short(plan.model)} on {short(plan.dataset)}, planned for {plan.gpu.name}",
        subject=workload_and_gpu_text(plan),
        verdict=_verdict(plan, *(["Nothing was measured."] if top is None else [])),
        sections=(
            *doc.listing("What might change this (not predicted)", () if fits else way_out_lines(plan)),
            *doc.listing("Why nothing is predicted", () if best is not None else unknown_lines(plan)),
            *compared_section(BASELINE_NAME, chosen, _comparison_of_plan(plan), doc.Medium.PAGES),
            doc.Section("Charts", (doc.Charts(plane, steps, untraced),), doc.Medium.PAGES),
            doc.Section("Best speed for each amount of memory", (plane,), doc.Medium.PAGES),
            doc.Section("Candidates", (_candidates(plan, top),)),
            *peak_section("Memory at the peak", _needs(plan), plan.budget_bytes),
            *compared_section(BASELINE_NAME, chosen, comparison_rows(*_epochs(plan)), doc.Medium.TERMINAL),
            *lengths_section(plan.lengths, plan.limit, subject),
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


def _steps(plan: Plan, chosen: str) -> tuple[tuple[doc.Step, ...], str]:
    candidates = [("recommended", chosen, plan.timeline, "")] if plan.best is not None else []
    if plan.best is None or plan.best.candidate != plan.baseline.candidate:
        candidates.append(("default", BASELINE_NAME, plan.baseline_timeline, ""))
    return step_memory(candidates, predicted=True)


def _comparison_of_plan(plan: Plan) -> tuple[tuple[doc.Cell, ...], ...]:
    if plan.best is None:
        return ()
    (chosen, baseline), epochs = (_values(plan, one) for one in (plan.best, plan.baseline)), _epochs(plan)
    return comparison_rows({**chosen, **epochs[0]}, {**baseline, **epochs[1]})


def _epochs(plan: Plan) -> tuple[dict[str, Value], dict[str, Value]]:
    """Return batches, steps and epoch of the best candidate and of the baseline; nothing where they are not known."""
    chosen, baseline = plan.epoch, plan.baseline_epoch
    if chosen is None or baseline is None:
        return {}, {}
    counted = find_trainer(plan.trainer).counted
    return epoch_values(chosen, (chosen, baseline), counted), epoch_values(baseline, (chosen, baseline), counted)


def _values(plan: Plan, one: Estimate) -> dict[str, Value]:
    memory, (need, spare, host) = one.memory, memory_cells(one)
    needed_bytes = memory.device_bytes if memory is not None else None
    return {
        "memory needed": Value(need, needed_bytes, whole=plan.budget_bytes),
        "to spare": Value(spare),
        "memory may be off by": Value(f"{100 * memory.error:.0f} %" if memory is not None else MISSING),
        "host memory of a machine": Value(host),
        "speed": Value(rate_or_dash(one.tokens_per_second), one.tokens_per_second),
    }


def _points(plan: Plan) -> tuple[doc.Point, ...]:
    """Return the candidates whose memory and speed are known."""
    roles = {plan.baseline.candidate: "default"} | ({plan.best.candidate: "recommended"} if plan.best else {})
    return tuple(
        doc.Point(
            choices_text(one.candidate, plan),
            "traced",
            one.memory.device_bytes,
            one.tokens_per_second,
            roles.get(one.candidate, "other"),
        )
        for one in {estimate.candidate: estimate for estimate in (*plan.estimates, plan.baseline)}.values()
        if one.memory is not None and one.tokens_per_second is not None
    )


def _candidates(plan: Plan, top: int | None) -> doc.Candidates:
    listed = distinct(plan.estimates, top or len(plan.estimates))
    numbered = [(str(number), one) for number, one in enumerate(listed, 1)]
    if plan.baseline.candidate not in [one.candidate for one in listed]:
        numbered.append((MISSING, plan.baseline))
    changes = {change.candidate: change_text(change) for change in plan.changes}
    part = f" {len(numbered):,} of them are below." if top is None and len(numbered) < len(plan.estimates) else ""
    shown = [one for _, one in numbered]
    return doc.Candidates(
        counts=f"{candidate_counts_text(plan)}{part}",
        lines=(
            f"{traces_text(plan, shown)}; of candidates {_ALIKE}, one is shown",
            *(unknown_lines(plan) if plan.best is not None else ()),
        ),
        number="",
        columns=("needs", "to spare", "host", "tok/s"),
        last=f"what differs from {BASELINE_NAME}",
        rows=tuple(
            doc.CandidateRow(
                number=number,
                name=choices_text(one.candidate, plan),
                outcome="unknown" if one.memory is None else "fits" if one.fits else "does not fit",
                cells=(*memory_cells(one), number_or_dash(one.tokens_per_second)),
                reason=changes.get(one.candidate, one.reason),
                tone=doc.Tone.PLAIN if one.fits else doc.Tone.BAD,
            )
            for number, one in numbered
        ),
        in_terminal=True,
    )


def _needs(plan: Plan) -> dict[str, Mapping[str, int]]:
    """Return the memory at the peak of the best candidate and the baseline, by category."""
    best = plan.best
    memories = {} if best is None else {"fastest" if best.fits else "least": best.memory}
    if best is None or best.candidate != plan.baseline.candidate:
        memories["default"] = plan.baseline.memory
    return {name: memory.breakdown for name, memory in memories.items() if memory is not None}


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", plan.model
    yield "dataset", plan.dataset
    number = f"{plan.processes} x " if plan.processes > 1 else ""
    yield "planned for", f"{number}{plan.gpu.name}, {bytes_or_dash(plan.gpu.memory_bytes)} ({plan.gpu.memory_kind})"
    yield from sorted(plan.environment.items())
