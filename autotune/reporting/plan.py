"""The report of ``autotune plan``: the fastest candidate that fits, the table of candidates, and where memory goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import ALIKE_MEMORY, ALIKE_SPEED, Change, Estimate, Plan, distinct
from autotune.core.documents.explanation import Explanation, Subject
from autotune.core.documents.rent import BILLION, Rent, cost_of
from autotune.core.rows.epoch import Epoch
from autotune.reporting import document as doc
from autotune.reporting import sections, words
from autotune.reporting.explanation import explanation_stages
from autotune.reporting.outlook import allow_lines, left_out_lines, more_memory_text
from autotune.trainers import find_trainer
from autotune.units import format_bytes, format_duration, format_rate, plural

_ALIKE = f"within {100 * ALIKE_SPEED:.0f} % in speed"
_LESS = f"over {100 * ALIKE_MEMORY:.0f} % less memory"


def plan_report(plan: Plan, top: int | None = None) -> doc.Document:
    """Return the report about a plan, or in a terminal, if the plan has an explanation, the stages of that estimate.

    Args:
        top: number of candidates in a terminal; None for a page, which has all that differ enough.
    """
    if plan.explanation is not None and top is not None:
        return _explanation_report(plan, plan.explanation)
    best, fits, chosen = plan.best, plan.fastest is not None, _chosen(plan)
    legend = (("recommended", chosen), ("default", words.BASELINE_NAME), ("other", "other candidates"))
    plane = doc.Plane(_points(plan), plan.budget_bytes, legend, "memory needed")
    return doc.Document(
        title=f"{sections.page_title(plan.trainer, plan.model, plan.dataset)}, planned for {plan.gpu.name}",
        subject=workload_and_gpu_text(plan),
        verdict=_verdict(plan, *(["Nothing was measured."] if top is None else [])),
        sections=(
            *doc.listing("What might change this (not predicted)", () if fits else way_out_lines(plan)),
            *doc.listing("Why nothing is predicted", () if best is not None else unknown_lines(plan)),
            *sections.comparison_sections(words.BASELINE_NAME, chosen, _comparison_of_plan(plan), doc.Medium.PAGES),
            doc.Section("Charts", (doc.Charts(plane, _steps(plan, chosen)),), doc.Medium.PAGES),
            doc.Section("Best speed for each amount of memory", (plane,), doc.Medium.PAGES),
            doc.Section("Candidates", (_candidates(plan, top),)),
            *sections.peak_sections("Memory at the peak", _needs(plan), plan.budget_bytes),
            *sections.comparison_sections(
                words.BASELINE_NAME, chosen, sections.comparison_rows(*_epochs(plan)), doc.Medium.TERMINAL
            ),
            *doc.listing("Left out", left_out_lines(plan.left_out)),
            *doc.listing("Not traced, since it changes training", allow_lines(plan.unlockable) if fits else ()),
            *doc.listing("Notes", plan.notes),
            sections.closing_section("Predicted with", _facts(plan), plan.settings),
        ),
    )


def _chosen(plan: Plan) -> str:
    """Return the criterion by which the best candidate was chosen, as its name."""
    best = plan.best
    if best is not None and not best.fits:
        return "least memory"
    return "largest margin" if best is not None and best.tokens_per_second is None else "fastest that fits"


def _explanation_report(plan: Plan, explanation: Explanation) -> doc.Document:
    """Return the report about the estimate that a plan explains."""
    subject = f"the {_chosen(plan)}"
    if explanation.subject is Subject.BASELINE:
        subject = f"{words.BASELINE_NAME}, since nothing {'could be predicted' if plan.best is None else 'fits'},"
    title = f"How the estimate of {subject} is computed"
    return doc.Document(
        subject=workload_and_gpu_text(plan),
        verdict=doc.Verdict(title, doc.Tone.PLAIN, choices_text(explanation.candidate, plan)),
        sections=(*explanation_stages(explanation, plan), *doc.listing("Notes", plan.notes)),
    )


def _verdict(plan: Plan, *remarks: str) -> doc.Verdict:
    best, doubt = plan.best, doubt_text(plan)
    return doc.Verdict(
        headline(plan),
        doc.Tone.BAD if plan.fastest is None else doc.Tone.GOOD,
        choices=choices_text(best.candidate, plan) if best is not None and len(plan.estimates) > 1 else "",
        remarks=(*map(doc.Paragraph, remarks), *([doc.Paragraph(doubt, doc.Tone.UNSURE)] if doubt else [])),
    )


def _steps(plan: Plan, chosen: str) -> tuple[doc.Step, ...]:
    candidates = [("recommended", chosen, plan.timeline)] if plan.best is not None else []
    if plan.best is None or plan.best.candidate != plan.baseline.candidate:
        candidates.append(("default", words.BASELINE_NAME, plan.baseline_timeline))
    return tuple(doc.Step(role, name, timeline) for role, name, timeline in candidates if timeline is not None)


def _comparison_of_plan(plan: Plan) -> tuple[tuple[doc.Cell, ...], ...]:
    if plan.best is None:
        return ()
    (chosen, baseline), epochs = (_values(plan, one) for one in (plan.best, plan.baseline)), _epochs(plan)
    return sections.comparison_rows({**chosen, **epochs[0]}, {**baseline, **epochs[1]})


def _epochs(plan: Plan) -> tuple[dict[str, sections.Value], dict[str, sections.Value]]:
    """Return batches, steps and epoch of the best candidate and of the baseline; empty if not known."""
    chosen, baseline = plan.epoch, plan.baseline_epoch
    if chosen is None or baseline is None:
        return {}, {}
    compared, documents = (chosen, baseline), find_trainer(plan.trainer).document_noun
    ours, theirs = (
        {**_cost(plan, estimate, one), **sections.epoch_values(one, compared, documents, estimate)}
        for estimate, one in ((plan.best, chosen), (plan.baseline, baseline))
    )
    return ours, theirs


def _cost(plan: Plan, estimate: Estimate | None, epoch: Epoch) -> dict[str, sections.Value]:
    """Return the cost of an epoch, or of a billion tokens without a dataset; nothing without a price or a speed.

    What does not fit has no cost.
    """
    rate = estimate.tokens_per_second if estimate is not None else None
    if plan.price is None or estimate is None or not rate:
        return {}
    unit, seconds = "epoch", epoch.seconds_per_epoch
    if seconds is None:
        unit, seconds = "1e9 tokens", BILLION / rate
    cost = cost_of(seconds, plan.price, plan.processes) if estimate.fits else None
    return {f"cost per {unit}": sections.Value(words.predicted_rate(estimate, words.cost_text(cost)))}


def _values(plan: Plan, estimate: Estimate) -> dict[str, sections.Value]:
    memory, (need, spare, host) = estimate.memory, words.memory_cells(estimate)
    needed_bytes = memory.device_bytes if memory is not None else None
    return {
        "memory needed": sections.Value(need, needed_bytes, whole=plan.budget_bytes),
        "to spare": sections.Value(spare),
        "memory may be off by": sections.Value(_percent_or_dash(memory.error if memory is not None else None)),
        "host memory of a machine": sections.Value(host),
        "speed": sections.Value(
            words.predicted_rate(estimate, words.rate_or_dash(estimate.tokens_per_second)), estimate.tokens_per_second
        ),
        "speed may be off by": sections.Value(_percent_or_dash(memory.time_error if memory is not None else None)),
    }


def _points(plan: Plan) -> tuple[doc.Point, ...]:
    """Return a point for each candidate with known memory and speed."""
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
        numbered.append((words.MISSING, plan.baseline))
    changes = {change.candidate: change_text(change) for change in plan.changes}
    part = f" {len(numbered):,} of them are below." if top is None and len(numbered) < len(plan.estimates) else ""
    shown = [one for _, one in numbered]
    return doc.Candidates(
        counts=f"{candidate_counts_text(plan)}{part}",
        lines=(
            traces_text(plan, shown),
            f"of candidates {_ALIKE}, only the fastest and those that need {_LESS} are shown",
            *(unknown_lines(plan) if plan.best is not None else ()),
        ),
        number="",
        columns=("needs", "to spare", "host", "tok/s"),
        last=f"differences from {words.BASELINE_NAME}",
        rows=tuple(
            doc.CandidateRow(
                number=number,
                name=choices_text(one.candidate, plan),
                outcome="unknown" if one.memory is None else "fits" if one.fits else "does not fit",
                cells=(
                    *words.memory_cells(one),
                    words.predicted_rate(one, words.number_or_dash(one.tokens_per_second)),
                ),
                reason=changes.get(one.candidate, one.reason),
                tone=doc.Tone.PLAIN if one.fits else doc.Tone.BAD,
            )
            for number, one in numbered
        ),
        in_text=True,
    )


def _needs(plan: Plan) -> dict[str, Mapping[str, int]]:
    """Return the memory at the peak of the best candidate and the baseline, by category."""
    best, baseline = plan.best, plan.baseline
    name = {"fastest that fits": "fastest", "least memory": "least"}.get(_chosen(plan), "best")
    memories = {name: best.memory} if best is not None else {}
    memories |= {"default": baseline.memory} if best is None or best.candidate != baseline.candidate else {}
    return {name: memory.breakdown for name, memory in memories.items() if memory is not None}


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", plan.model
    yield "dataset", plan.dataset
    number = f"{plan.processes} x " if plan.processes > 1 else ""
    yield "planned for", f"{number}{plan.gpu.name}, {format_bytes(plan.gpu.memory_bytes)} ({plan.gpu.memory_kind})"
    yield from sorted(plan.environment.items())


def workload_and_gpus_text(plan: Plan | Rent, target: str) -> str:
    """Return the workload with its fixed choices, and the GPUs of the plan (``target``)."""
    fixed = plan.settings.get("fix")
    choices = f", with {words.format_choices(fixed)}" if isinstance(fixed, Mapping) and fixed else ""
    return f"{plan.model} on {plan.dataset}, global batch {plan.global_batch_size}{choices}, planned for {target}"


def traces_text(plan: Plan | Rent, estimates: Iterable[Estimate] = ()) -> str:
    """Return the number of traces of a plan, its duration, and the largest error of ``estimates``."""
    traces = f"{plural(plan.trace_count, 'trace')} ({plan.new_trace_count:,} new)"
    traces += f" in {format_duration(plan.wall_seconds)}"
    error = max((one.memory.error for one in estimates if one.memory is not None), default=0.0)
    return f"{traces}; memory may be off by {_percent(error)}" if error else traces


def workload_and_gpu_text(plan: Plan) -> str:
    """Return the workload, and the number, kind and memory of the GPUs of the plan."""
    part = plan.budget_bytes < plan.gpu.memory_bytes
    several = plan.processes > 1
    name = f"{plan.processes} x {plan.gpu.name}" if several else plan.gpu.name
    memory = f"{format_bytes(plan.budget_bytes)} of {'each of ' if several else ''}{name}" if part else name
    has = "" if part else f", {'each of which' if several else 'which'} has {format_bytes(plan.budget_bytes)}"
    return workload_and_gpus_text(plan, f"{memory}{has}")


def choices_text(candidate: Candidate, plan: Plan) -> str:
    """Return a candidate's differences from TRL's default, without the fixed choices."""
    return (
        words.format_choices(candidate.differences(plan.baseline.candidate))
        or f"{words.BASELINE_NAME}{' otherwise' if plan.settings.get('fix') else ''}"
    )


def headline(plan: Plan) -> str:
    """Return the candidate predicted to be best in one sentence."""
    best, alone = plan.best, len(plan.estimates) == 1
    if best is None or best.memory is None:
        return "Nothing can be predicted here: autotune probe shows whether it trains."
    if not best.fits:
        traced = " that was traced" if plan.settings.get("timeout") else ""
        what, which = ("It does not fit", "it") if alone else (f"Nothing{traced} is predicted to fit", "the least")
        needs = format_bytes(best.memory.device_bytes)
        return f"{what} in {format_bytes(plan.budget_bytes)}: {which} needs {needs}."
    what, spare = "It fits" if alone else f"The {_chosen(plan)}", words.bytes_or_dash(best.spare_bytes)
    if best.tokens_per_second is None:
        return f"{what}: {spare} to spare; no speed is predicted"
    each = f" ({best.tokens_per_second / plan.processes:,.0f} per GPU)" if plan.processes > 1 else ""
    rate = words.predicted_rate(best, format_rate(best.tokens_per_second))
    return f"{what}: {rate}{each}, with {spare} to spare"


def doubt_text(plan: Plan) -> str:
    """Return why the best candidate might not fit, with an alternative; empty if it fits with its error."""
    best = plan.fastest
    if best is None:
        return ""
    safer = () if best.fits_with_error else (_safer_text(plan),)
    return " ".join((*doubts(best, plan.host_bytes), *safer))


def doubts(estimate: Estimate, host_bytes: int | None) -> tuple[str, ...]:
    """Return why an estimate that fits might run out of the device's or the host's memory, in sentences."""
    memory, found = estimate.memory, list[str]()
    if memory is not None and not estimate.fits_with_error:
        off = f"±{_percent(memory.error)}, {format_bytes(memory.error * memory.device_bytes)}"
        varied_bytes = memory.varied_bytes
        more = f" and what batches of varied lengths may add ({format_bytes(varied_bytes)})" if varied_bytes else ""
        found.append(f"The margin is below the stated error ({off}){more}: it may not fit.")
    if memory is not None and host_bytes is not None and memory.machine_bytes > host_bytes:
        needed = f"up to {format_bytes(memory.machine_bytes)} are needed there"
        found.append(
            f"The host may run out of memory: {needed}, and the machine planned for has {format_bytes(host_bytes)}."
        )
    return tuple(found)


def _safer_text(plan: Plan) -> str:
    safe = next((estimate for estimate in plan.estimates if estimate.fits and estimate.fits_with_error), None)
    if safe is None:
        return "Nothing fits with its error to spare."
    known = safe.tokens_per_second is not None
    rate = f"{words.predicted_rate(safe, words.rate_or_dash(safe.tokens_per_second))}, " if known else ""
    return (
        f"{'The fastest' if known else 'One'} that fits with its error to spare: {rate}"
        f"{words.bytes_or_dash(safe.spare_bytes)} to spare: {choices_text(safe.candidate, plan)}"
    )


def change_text(change: Change) -> str:
    """Return the change that makes a candidate fit, such as ``fits with liger=on, 2.00 GiB to spare``."""
    choices = words.format_choices(change.instead.candidate.differences(change.candidate))
    return f"fits with {choices}, {words.bytes_or_dash(change.instead.spare_bytes)} to spare"


def way_out_lines(plan: Plan) -> tuple[str, ...]:
    """Return changes outside the searched space that might make a candidate fit; none if no need is known."""
    if plan.best is None:
        return ()
    shorter = () if plan.limit is None else (f"a --max-length below {plan.limit.max_length:,}",)
    return (*allow_lines(plan.unlockable), *shorter, more_memory_text(plan.budget_bytes, plan.gpu.memory_bytes))


def candidate_counts_text(plan: Plan) -> str:
    """Return how many candidates were traced, and how many of them fit."""
    number = plan.candidate_counts
    counts = {"fitting": number.fitting, "not fitting": number.too_large, "unknown": number.unknown}
    parts = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"{plural(len(plan.estimates), 'candidate')}: {parts or 'none legal'}."


def unknown_lines(plan: Plan) -> tuple[str, ...]:
    """Return why estimates are missing, the most frequent reasons first, each with its count."""
    reasons = Counter(estimate.reason for estimate in plan.estimates if estimate.reason)
    return tuple(f"{count:,} unknown: {reason}" for reason, count in reasons.most_common())


def _percent_or_dash(error: float | None) -> str:
    return words.MISSING if error is None else _percent(error)


def _percent(error: float) -> str:
    """Return a relative error in per cent; it may exceed 100 %."""
    return f"{100 * error:.0f} %"
