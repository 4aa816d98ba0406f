"""The report of ``autotune plan --explain``: the stages of one estimate, from the training plan to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autotune.core.batch_geometry import Shape, Typical
from autotune.core.estimate import Estimate, Plan
from autotune.core.explanation import Explanation, Subject, TracedPoint
from autotune.core.program import CONSTRUCTION, MICRO_BATCH
from autotune.core.timeline import Occurrence, Part
from autotune.reporting import document as doc
from autotune.reporting.plan_words import BASIS, said_choices, said_target
from autotune.reporting.words import BASELINE_NAME, said_bytes, said_rate
from autotune.units import format_bytes, format_seconds, format_share

_Pair = tuple[str, str]
_SUBJECTS = {
    Subject.FASTEST: "the fastest that fits",
    Subject.BASELINE: f"{BASELINE_NAME}, since nothing fits,",
}


def explanation_report(explanation: Explanation, plan: Plan) -> doc.Document:
    """Return the report about one estimate of a plan."""
    everything = (*plan.estimates, plan.baseline)
    estimate = next(estimate for estimate in everything if estimate.candidate == explanation.candidate)
    return doc.Document(
        subject=said_target(plan),
        verdict=doc.Verdict(
            f"How the estimate of {_SUBJECTS[explanation.subject]} came about",
            doc.Tone.PLAIN,
            said_choices(explanation.candidate, plan),
        ),
        sections=(*_stages(explanation, plan, estimate), *doc.listing("Notes", plan.notes)),
    )


def _stages(explanation: Explanation, plan: Plan, estimate: Estimate) -> Iterator[doc.Section]:
    yield _stage("Training plan", doc.Facts(tuple(_plan_rows(explanation))))
    yield _stage("Documents and batch geometry", doc.Facts(tuple(_geometry_rows(explanation, plan))))
    if not explanation.traces:
        yield _stage("Traces", doc.Paragraph(f"None: {estimate.reason}"))
        return
    yield _stage(f"Traces ({BASIS[estimate.origin]})", *_traces(explanation))
    whole = f"{explanation.layers} layers, {_said_shape(explanation.geometry.worst)}"
    title = f"Extrapolated to {whole}: the most bytes of tensors in each part of the step"
    yield _stage(title, _peaks(explanation))
    yield _stage("Memory of the device", doc.Facts(tuple(_memory_rows(explanation, estimate))))
    yield _stage("Time of a typical optimizer step", *_times(explanation, estimate))


def _stage(title: str, *blocks: doc.Block) -> doc.Section:
    return doc.Section(title, blocks, heading=True)


def _plan_rows(explanation: Explanation) -> Iterator[_Pair]:
    plan = explanation.training_plan
    yield "trainer", plan.trainer
    yield "args", _said_fields(plan.args)
    yield "model", _said_fields(plan.model)
    if plan.truncate_to is not None:
        yield "rows are cut beforehand to", _said_tokens(plan.truncate_to)
    if plan.launch.processes > 1:
        yield "processes", str(plan.launch.processes)


def _geometry_rows(explanation: Explanation, plan: Plan) -> Iterator[_Pair]:
    geometry = explanation.geometry
    sequences = f", {geometry.sequences} sequences in each" if geometry.sequences > 1 else ""
    longest = _said_tokens(explanation.longest_tokens)
    amount = f"{explanation.documents:,}{sequences}, {_said_tokens(explanation.document_tokens)}"
    yield "documents", f"{amount}; the longest sequence has {longest}"
    yield "rows of an epoch", f"{geometry.rows:,}"
    yield "layout", geometry.layout.value
    yield "worst micro-batch", _said_shape(geometry.worst)
    sizes = ", ".join(_said_share(size, len(geometry.sizes)) for size in geometry.sizes)
    yield "typical micro-batches", f"{sizes}; {geometry.tokens:,.0f} tokens without padding on average"
    micro_batches = _said_count(geometry.micro_batches, "micro-batch", "micro-batches")
    asked = f"{plan.global_batch_size} asked for"
    yield "optimizer step", f"{micro_batches}, {geometry.documents:,.1f} documents on average, {asked}"


def _traces(explanation: Explanation) -> Iterator[doc.Block]:
    points = explanation.traces
    new = sum(point.new for point in points)
    yield doc.Paragraph(
        f"{_said_count(len(points), 'trace', 'traces')}, {new} run now, {len(points) - new} from the cache"
    )
    yield _points(points)
    if not explanation.aligned:
        yield doc.Paragraph("Moments differ between the traces, so that only their peaks were followed.")
    assumed = Counter(what for point in points for what in point.assumptions)
    yield doc.Listing(
        tuple(f"Assumed in {traces} of {len(points)}: {what}" for what, traces in sorted(assumed.items()))
    )


def _points(points: Sequence[TracedPoint]) -> doc.Table:
    rows = tuple(
        (
            f"{point.layers}, {_said_shape(point.shape)}",
            f"{round(point.weight, 3) + 0.0:+.3f}",
            format_bytes(point.tensor_bytes),
            format_bytes(point.allocated_bytes),
            said_bytes(point.reserved_bytes),
            "new" if point.new else "cache",
        )
        for point in points
    )
    return doc.Table(("layers, micro-batch", "weight", "tensors", "allocated", "reserved", ""), rows)


def _peaks(explanation: Explanation) -> doc.Table:
    rows, marked = list[tuple[str, ...]](), None
    for peak in explanation.peaks:
        ordered = sorted(peak.categories.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in ordered)
        direction = ", backward" if peak.backward else ", forward"
        name = _said_part(peak.part) + (direction if peak.part.phase == MICRO_BATCH else "")
        if peak is explanation.peak:
            name, marked = f"{name}  <- peak", len(rows)
        rows.append((name, format_bytes(peak.total_bytes), parts))
    return doc.Table(("part of the step", "tensors", "of these"), tuple(rows), words=(0, 2), marked=marked)


def _memory_rows(explanation: Explanation, estimate: Estimate) -> Iterator[_Pair]:
    highest, memory, added = explanation.peak, estimate.memory, explanation.additions
    if highest is None or memory is None:
        return
    yield "tensors at the peak", format_bytes(highest.total_bytes)
    for name, size in (
        ("rounding to blocks", added.rounding_bytes),
        ("workspaces", added.workspace_bytes),
        ("fragmentation", added.fragmentation_bytes),
        ("context", added.context_bytes),
    ):
        yield f"+ {name}", format_bytes(size)
    yield "= needs", f"{format_bytes(memory.device_bytes)}, ±{100 * memory.error:.0f} %"
    yield "  to spare", said_bytes(estimate.spare_bytes)
    varied = "not traced" if memory.varied_bytes is None else format_bytes(memory.varied_bytes)
    yield "  varied lengths may add", varied
    yield "  host memory beside it", format_bytes(memory.host_bytes)
    if memory.host_need_bytes != memory.host_bytes:
        yield "  host memory of a machine", format_bytes(memory.host_need_bytes)


def _times(explanation: Explanation, estimate: Estimate) -> Iterator[doc.Block]:
    if not explanation.times or estimate.memory is None or estimate.memory.step_seconds is None:
        yield doc.Paragraph("Not predicted: the speed of the device is not known.")
        return
    rows = [
        (
            _said_part(time.part),
            format_seconds(time.seconds),
            f"{time.times:,}",
            format_seconds(time.seconds * time.times),
        )
        for time in explanation.times
    ]
    rows.append(("optimizer step", "", "", format_seconds(estimate.memory.step_seconds)))
    yield doc.Table(("part of the step", "seconds", "times", "together"), tuple(rows), total=len(rows) - 1)
    yield doc.Paragraph(f"= {said_rate(estimate.tokens_per_second)} of the dataset, padding excluded")


def _said_part(part: Part) -> str:
    if part == Part(CONSTRUCTION, Occurrence.BEFORE):
        return "construction, earlier steps"
    words = {Occurrence.FIRST: f"first {part.phase}", Occurrence.FURTHER: f"further {part.phase}"}
    return words.get(part.occurrence, part.phase)


def _said_shape(shape: Shape) -> str:
    beside = f", mismatched pairs of {_said_tokens(shape.beside)}" if shape.beside else ""
    return f"{_said_count(shape.rows, 'row', 'rows')} of {_said_tokens(shape.tokens)}{beside}"


def _said_share(size: Typical, sizes: int) -> str:
    return f"{format_share(size.share)} of {_said_shape(size.shape)}" if sizes > 1 else _said_shape(size.shape)


def _said_tokens(tokens: float) -> str:
    return f"{tokens:,.0f} tokens"


def _said_count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _said_fields(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(fields.items())) or "TRL's defaults"
