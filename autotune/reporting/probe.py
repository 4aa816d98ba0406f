"""The report of ``autotune probe``: the recommendation against the baseline, its choices, the candidates and charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from autotune.core.candidate import Candidate
from autotune.core.documents.result import MeasuredCandidate, Result, Trial
from autotune.core.program import CONSTRUCTION, LOADING, MICRO_BATCH, OPTIMIZER_STEP, SAVE
from autotune.core.status import ProbeStatus, RunStatus
from autotune.reporting import comparison, outlook, sections, words
from autotune.reporting import document as doc
from autotune.units import format_bytes, format_seconds

_USUAL_PHASES = frozenset({CONSTRUCTION, LOADING, MICRO_BATCH, OPTIMIZER_STEP, SAVE})
"""Phases of every training: without others, the table of phases is not shown."""


def probe_report(result: Result, program: Callable[[str], str] = str) -> doc.Document:
    """Return the report about a search; ``program`` returns the command that starts the program of a name here."""
    name = outlook.baseline_name(result)
    nothing_fits = result.status is RunStatus.NOTHING_FITS
    ways_out = outlook.way_out_lines(result) if nothing_fits else ()
    # Nothing was learnt yet, and the search goes on with --resume.
    unstarted = result.recommended is None and result.status is RunStatus.INTERRUPTED
    left_out = () if unstarted else outlook.left_out_lines(result.left_out)
    further = () if nothing_fits or unstarted else outlook.allow_lines(result.unlockable)
    legend = (("recommended", "recommended"), ("default", name), ("other", "other candidates"))
    plane, pages = doc.Plane(_points(result), result.budget_bytes, legend, "memory used"), doc.Medium.PAGES
    return doc.Document(
        title=sections.page_title(result.trainer, result.workload.model.name, result.workload.dataset.name),
        verdict=_verdict(result, program),
        sections=(
            *doc.listing("What might change this (not measured)", ways_out),
            *_figures(result, name),
            doc.Section("Charts", (doc.Charts(plane, _steps(result, name)),), pages),
            *_contributions(result),
            *_file(result),
            doc.Section("Best speed for each amount of memory", (plane,)),
            doc.Section("Candidates", (_trials(result),)),
            *sections.peak_sections("Memory at the peak, as traced", _needs(result, name), result.budget_bytes, pages),
            *doc.listing("Not searched", left_out),
            *doc.listing("Not measured, since it changes training", further),
            *doc.listing("Notes", filter(None, (comparison.step_change_text(result), *result.notes))),
            *_bundle(result, program),
            sections.closing_section("Measured with", _facts(result), result.settings),
        ),
    )


def _verdict(result: Result, program: Callable[[str], str]) -> doc.Verdict:
    chosen = result.recommended
    if result.status in (RunStatus.NOTHING_FITS, RunStatus.FAILED):
        return doc.Verdict(outlook.nothing_fits_text(result), doc.Tone.BAD)
    if chosen is None:
        return doc.Verdict(outlook.interrupted_text(result), doc.Tone.UNSURE)
    same = result.baseline is not None and chosen.candidate == result.baseline.candidate
    done = result.confirmed and result.status is not RunStatus.INTERRUPTED
    return doc.Verdict(
        comparison.headline(result, chosen),
        doc.Tone.GOOD,
        choices="" if same else outlook.candidate_name(result, chosen.candidate),
        remarks=(
            doc.Paragraph(comparison.confirmed_text(result), doc.Tone.GOOD if done else doc.Tone.UNSURE),
            doc.Paragraph(comparison.runs_text(result, chosen)),
        ),
        command=outlook.next_command(result, program),
    )


def _figures(result: Result, name: str) -> Iterator[doc.Section]:
    if result.recommended is None:
        return
    compared = comparison.comparison_of_search(result, result.recommended)
    yield from sections.comparison_sections(name, "recommended", compared)
    peaks, seconds = result.recommended.peaks, result.recommended.seconds
    names = dict.fromkeys((*peaks, *seconds))
    if set(names) <= _USUAL_PHASES:
        return
    highest, step = max(peaks.values(), default=0), sum(seconds.values())
    rows = tuple(
        (
            name,
            words.bytes_or_dash(peaks.get(name)),
            doc.Bar(peaks[name] / highest if highest and name in peaks else None),
            format_seconds(seconds[name]) if name in seconds else words.MISSING,
            doc.Bar(seconds[name] / step if step and name in seconds else None),
        )
        for name in names
    )
    columns = ("phase", "peak memory", "", "time per step, of one run", "")
    yield doc.Section("Phases of a step", (doc.Table(columns, rows),))


def _compared_candidates(result: Result, name: str) -> list[tuple[str, str, MeasuredCandidate]]:
    """Return the recommendation and, if it differs, the baseline, with their roles and names."""
    chosen, baseline = result.recommended, result.baseline
    candidates = [] if chosen is None else [("recommended", "recommended", chosen)]
    if baseline is not None and (chosen is None or chosen.candidate != baseline.candidate):
        candidates.append(("default", name, baseline))
    return candidates


def _steps(result: Result, name: str) -> tuple[doc.Step, ...]:
    compared = _compared_candidates(result, name)
    known = ((role, name, one, one.timeline) for role, name, one in compared)
    return tuple(doc.Step(role, name, line, _measured_text(one)) for role, name, one, line in known if line is not None)


def _needs(result: Result, name: str) -> dict[str, Mapping[str, int]]:
    """Return the memory at the peak of the compared candidates by category, as traced."""
    known = ((name, one.timeline) for _, name, one in _compared_candidates(result, name))
    return {name: timeline.breakdown for name, timeline in known if timeline is not None}


def _contributions(result: Result) -> Iterator[doc.Section]:
    most = max((item.speedup for item in result.contributions if item.speedup is not None), default=1.0)
    rows = tuple(
        (
            doc.Code(f"{item.knob}={item.choice}"),
            doc.Code(str(item.instead_of)),
            comparison.contribution_text(item),
            doc.Bar(
                item.speedup / most if item.speedup is not None else None,
                "other" if item.significant is False else "recommended",
            ),
        )
        for item in result.contributions
    )
    columns = ("choice", outlook.baseline_name(result), "effect of reverting it", "")
    if rows:
        yield doc.Section("Effect of each choice", (doc.Table(columns, rows, words=(0, 1, 2), stacked=True),))


def _file(result: Result) -> Iterator[doc.Section]:
    """Yield the most expensive settings of the user's own file, and the changes to it."""
    base = result.base
    if base is None:
        return
    title = f"Cost of settings in {words.printable(base.file)}, in time of a step with all else as recommended"
    yield from doc.listing(title, comparison.costs(result))
    if base.diff:
        yield doc.Section(f"What changes in {base.file}", (doc.Diff(base.diff),))


def _points(result: Result) -> tuple[doc.Point, ...]:
    """Return a point for every candidate that ran; recommendation and baseline have the means of all their runs."""
    found: dict[Candidate, tuple[str, Trial | MeasuredCandidate]] = {
        trial.candidate: ("other", trial) for trial in result.trials if trial.status is ProbeStatus.OK
    }
    for role, one in (("default", result.baseline), ("recommended", result.recommended)):
        if one is not None:
            found[one.candidate] = (role, one)
    return tuple(
        doc.Point(outlook.candidate_name(result, one.candidate), f"probe {one.number}", held, rate, role)
        for role, one in found.values()
        if (held := one.used_bytes) is not None and (rate := one.tokens_per_second) is not None
    )


def _measured_text(candidate: MeasuredCandidate) -> str:
    if candidate.reserved_bytes is not None:
        return f"Probes measured {format_bytes(candidate.reserved_bytes)} reserved, without the context."
    if candidate.peak_bytes is None:
        return ""
    of_cpu = "which includes the reading of rows and images, and leaves out memory that is never written to"
    return f"Probes measured {format_bytes(candidate.peak_bytes)} of resident memory, {of_cpu}."


def _trials(result: Result) -> doc.Candidates:
    return doc.Candidates(
        counts=outlook.trial_counts_text(result),
        lines=outlook.veto_lines(result),
        number="probe",
        columns=("memory", "tok/s", "predicted"),
        last="candidate, and why it failed or was not tried",
        rows=tuple(
            doc.CandidateRow(
                number=str(trial.number),
                name=outlook.candidate_name(result, trial.candidate),
                outcome=words.status_text(trial.status),
                cells=(
                    words.bytes_or_dash(trial.used_bytes),
                    words.number_or_dash(trial.tokens_per_second),
                    words.bytes_or_dash(trial.predicted_bytes),
                ),
                reason=trial.reason or trial.illegal,
            )
            for trial in result.trials
        ),
        in_text=False,
    )


def _bundle(result: Result, program: Callable[[str], str]) -> Iterator[doc.Section]:
    if result.output_directory:
        written = "bundle" if result.recommended is not None else "result"
        blocks = [doc.Snippet(f"The {written} is in ", words.short_path(Path(result.output_directory)))]
        if result.recommended is not None:
            blocks.append(doc.Snippet("Train with:  ", outlook.next_command(result, program)))
        yield doc.Section("Bundle", tuple(blocks), doc.Medium.TERMINAL)


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    model, dataset, hardware = result.workload.model, result.workload.dataset, result.hardware
    yield "model", f"{model.name} ({model.architecture}, {model.parameters:,} parameters)"
    tokens = f", {sum(part.tokens for part in result.lengths):,} tokens" if result.lengths else ""
    yield "dataset", f"{dataset.name} ({dataset.lengths.rows:,} rows{tokens})"
    yield "device", f"{hardware.name}, {hardware.variables}" if hardware.variables else hardware.name
    yield from sorted(result.environment.items())
