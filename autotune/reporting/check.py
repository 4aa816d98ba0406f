"""The report of ``autotune check``: the verdict in one line, its evidence, the findings, and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from autotune.core.documents.verdict import EXIT_CODES, Finding, Fixed, Need, Outcome, Remedy, Severity, Source, Verdict
from autotune.reporting import document as doc
from autotune.units import format_bytes, format_rate, format_share

_SEVERITIES: Mapping[Severity, tuple[str, doc.Tone]] = {
    Severity.ERROR: ("Wrong", doc.Tone.BAD),
    Severity.SILENT: ("Silent behaviour", doc.Tone.UNSURE),
    Severity.NOTE: ("Notes", doc.Tone.PLAIN),
}


def verdict_report(verdict: Verdict, name: str = "") -> doc.Document:
    """Return the report about a check, after the ``name`` of its file if several were checked."""
    headline = f"{name}: {verdict.headline}" if name else verdict.headline
    return doc.Document(
        verdict=doc.Verdict(headline, doc.TONES[EXIT_CODES[verdict.outcome]], evidence=tuple(_evidence(verdict))),
        sections=tuple(_sections(verdict)),
    )


def _sections(verdict: Verdict) -> Iterator[doc.Section]:
    if verdict.need is not None and verdict.need.memory is not None:
        parts = sorted(verdict.need.memory.breakdown.items(), key=lambda item: -item[1])
        facts = doc.Facts(tuple((name, format_bytes(size)) for name, size in parts))
        yield doc.Section("Memory at the peak", (facts,), heading=True)
    for severity, (title, tone) in _SEVERITIES.items():
        # The headline has the reason.
        found = (item for item in verdict.findings if item.severity is severity and item.message != verdict.reason)
        yield from doc.listing(title, _messages(found), tone)
    if verdict.remedy is not None:
        yield _remedy(verdict.remedy, verdict.budget_bytes)
    elif verdict.outcome is Outcome.DOES_NOT_FIT:
        # The search is greedy, and counts a change only if it fits with its error.
        none = "No change of up to three techniques was found that fits within its error and keeps training the same."
        yield doc.Section("Remedy", (doc.Paragraph(none),))


def _messages(findings: Iterable[Finding]) -> Iterator[str]:
    for item in findings:
        yield f"{item.file}:{item.line}: {item.message}" if item.line is not None else item.message


def _evidence(verdict: Verdict) -> Iterator[str]:
    named = {"trainer": verdict.trainer, "model": verdict.model, "data": verdict.dataset, "on": verdict.device}
    what = [f"{word} {name}" for word, name in named.items() if name]
    if what:
        yield ", ".join(what)
    need = verdict.need
    if need is None:
        return
    if need.source is Source.TRACED:
        yield (
            f"TRL's own step, traced without a device: {format_bytes(need.bytes)}, between"
            f" {format_bytes(need.least_bytes)} and {format_bytes(need.most_bytes)} with"
            f" {' and '.join(_deviations(need))}"
        )
        if verdict.outcome is Outcome.FITS and need.varied_bytes is None:
            yield "There is ample room, so a deep model was traced with few layers, without batches of varied lengths."
    elif need.source is Source.PROBED:
        happened = "memory ran out" if verdict.outcome is Outcome.DOES_NOT_FIT else "the peak was"
        where = f"; {happened} in {need.phase}" if need.phase else ""
        yield f"Measured by a real run of its worst micro-batches{_rate(need)}{where}"
    else:
        yield f"Measured by the study of this bundle, on this device and with these versions{_rate(need)}"
    if verdict.outcome is Outcome.TOO_CLOSE and verdict.passes is None:
        where = ", without --gpu on such a device," if "gpu" in verdict.settings else ""
        yield f"--probe{where} runs it for real; --when-unsure pass (or fail) decides without a run."
    if verdict.from_cache:
        yield "From an earlier check; nothing has changed since."


def _deviations(need: Need) -> Iterator[str]:
    """Yield the parts of the distance between a traced need and its bounds."""
    memory = need.memory
    yield "the stated error" if memory is None else f"the stated error of {format_share(memory.error)}"
    if need.varied_bytes:
        yield f"{format_bytes(need.varied_bytes)} after batches of varied lengths"
    if memory is not None and need.most_bytes > memory.most_bytes:
        yield f"{format_bytes(need.most_bytes - memory.most_bytes)} of the process outside tensors"


def _rate(need: Need) -> str:
    return f", {format_rate(need.tokens_per_second)}" if need.tokens_per_second is not None else ""


def _remedy(remedy: Remedy, budget_bytes: int) -> doc.Section:
    slower = "; no speed is predicted"
    if remedy.slower is not None:
        slower = f", and a step of the largest micro-batches takes {remedy.slower:.2f} times as long"
    fits = f"{format_bytes(remedy.bytes)}, at most {format_bytes(remedy.most_bytes)} of {format_bytes(budget_bytes)}"
    lead = f"The smallest change that fits: {fits}{slower}"
    return doc.Section("Remedy", (doc.Listing(() if remedy.diff else remedy.lines, lead), doc.Diff(remedy.diff)))


def fixed_report(fixed: Fixed) -> doc.Document:
    """Return the report about ``check --fix-legacy``: the rewritten keys of a file, and those to change by hand."""
    unchanged = f"No key {'can be' if fixed.left else 'has to be'} rewritten, and no file was written."
    done = f"wrote {fixed.file}." if fixed.diff else unchanged
    others = "Its other keys are not checked: run autotune check on it without --fix-legacy."
    blocks = doc.Diff(fixed.diff), doc.Paragraph(f"{done} {others}")
    return doc.Document(
        None, (doc.Section("Changes", blocks), *doc.listing("To do by hand", _messages(fixed.left), doc.Tone.UNSURE))
    )
