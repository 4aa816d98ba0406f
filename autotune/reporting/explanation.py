"""The report of ``autotune plan --explain``: the stages of one estimate, from the training plan to memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autotune.core.documents.estimate import Estimate, Plan
from autotune.core.documents.explanation import Explanation, TracedPoint
from autotune.core.documents.memory_timeline import AT_REST, VLLM
from autotune.core.program import CONSTRUCTION, MICRO_BATCH
from autotune.core.rows.batch_geometry import Shape
from autotune.core.timeline import Occurrence, Part
from autotune.reporting import document as doc
from autotune.reporting.words import bytes_or_dash, predicted_rate, rate_or_dash
from autotune.techniques.traits import plan_impact
from autotune.units import format_bytes, format_seconds, format_share, plural

_Pair = tuple[str, str]
_SUMMANDS = {
    AT_REST: f"{AT_REST}, while vLLM loads or generates",
    "rounding": "+ rounding and library workspaces",
    **{name: f"+ {name}" for name in ("fragmentation", VLLM, "context", "process")},
}
"""Labels of the parts of the needed memory that are not tensors."""


def explanation_stages(explanation: Explanation, plan: Plan) -> Iterator[doc.Section]:
    """Yield the stages of the estimate that a plan explains, one section each."""
    everything = (*plan.estimates, plan.baseline)
    estimate = next(estimate for estimate in everything if estimate.candidate == explanation.candidate)
    yield _stage("Training plan", doc.Facts(tuple(_plan_rows(explanation))))
    yield _stage("Documents and batch geometry", doc.Facts(tuple(_geometry_rows(explanation, plan))))
    if not explanation.traces:
        yield _stage("Traces", doc.Paragraph(f"None: {estimate.reason}"))
        return
    yield _stage("Traces", *_traces(explanation))
    traced_whole = all(point.layers == explanation.layers for point in explanation.traces)
    depth = f"{'Traced with all' if traced_whole else 'Extrapolated to'} {plural(explanation.layers, 'layer')}"
    title = f"{depth}, {_shape_text(explanation.geometry.worst)}: peak of tensors in each part of the step"
    peak = explanation.peak
    at = (doc.Paragraph(f"The peak is at {peak.moment}."),) if peak is not None and peak.moment else ()
    yield _stage(title, _peaks(explanation), *at)
    yield _stage("Memory of the device", doc.Facts(tuple(_memory_rows(estimate))))
    yield _stage("Time of a typical optimizer step", *_times(explanation, estimate))


def _stage(title: str, *blocks: doc.Block) -> doc.Section:
    return doc.Section(title, blocks, heading=True)


def _plan_rows(explanation: Explanation) -> Iterator[_Pair]:
    plan = explanation.training_plan
    yield "trainer", plan.trainer
    yield "args", _fields_text(plan.args)
    yield "model", _fields_text(plan.model)
    if plan.truncate_to is not None:
        yield "rows are cut beforehand to", _tokens_text(plan.truncate_to)
    if plan.launch.processes > 1:
        yield "processes", str(plan.launch.processes)


def _geometry_rows(explanation: Explanation, plan: Plan) -> Iterator[_Pair]:
    geometry = explanation.geometry
    sequences = f", {geometry.sequences} sequences in each" if geometry.sequences > 1 else ""
    longest = _tokens_text(explanation.longest_tokens)
    amount = f"{explanation.documents:,}{sequences}, {_tokens_text(explanation.document_tokens)}"
    yield "documents", f"{amount}; the longest sequence has {longest}"
    yield "rows of an epoch", f"{geometry.rows:,}"
    yield "layout", geometry.layout.value
    yield "worst micro-batch", _shape_text(geometry.worst)
    several = len(geometry.sizes) > 1
    sizes = (
        (f"{format_share(size.share)} of " if several else "") + _shape_text(size.shape) for size in geometry.sizes
    )
    yield "typical micro-batches", f"{', '.join(sizes)}; {geometry.tokens:,.0f} tokens without padding on average"
    micro_batches = plural(geometry.micro_batches, "micro-batch", "micro-batches")
    asked = f"{plan.global_batch_size} requested"
    yield "optimizer step", f"{micro_batches}, {geometry.documents:,.1f} documents on average, {asked}"


def _traces(explanation: Explanation) -> Iterator[doc.Block]:
    points = explanation.traces
    yield _points(points)
    if not explanation.aligned:
        yield doc.Paragraph("The traces cannot be aligned moment by moment: only their peaks were extrapolated.")
    assumed = Counter(what for point in points for what in point.assumptions)
    yield doc.Listing(
        tuple(f"Assumed in {traces} of {len(points)}: {what}" for what, traces in sorted(assumed.items()))
    )


def _points(points: Sequence[TracedPoint]) -> doc.Table:
    rows = tuple(
        (
            f"{point.layers}, {_shape_text(point.shape)}",
            f"{round(point.weight, 3) + 0.0:+.3f}",
            format_bytes(point.tensor_bytes),
            format_bytes(point.allocated_bytes),
            bytes_or_dash(point.reserved_bytes),
        )
        for point in points
    )
    return doc.Table(("layers, micro-batch", "weight", "tensors", "allocated", "reserved"), rows)


def _peaks(explanation: Explanation) -> doc.Table:
    rows, marked = list[tuple[str, ...]](), None
    for peak in explanation.peaks:
        ordered = sorted(peak.categories.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in ordered)
        direction = ", backward" if peak.backward else ", forward"
        name = _part_text(peak.part) + (direction if peak.part.phase == MICRO_BATCH else "")
        if peak is explanation.peak:
            name, marked = f"{name}  <- peak", len(rows)
        rows.append((name, format_bytes(peak.total_bytes), parts))
    return doc.Table(("part of the step", "tensors", "by category"), tuple(rows), words=(0, 2), marked=marked)


def _memory_rows(estimate: Estimate) -> Iterator[_Pair]:
    memory = estimate.memory
    if memory is None:
        return
    beside = {name: size for name, size in memory.breakdown.items() if name in _SUMMANDS}
    tensor_bytes = sum(memory.breakdown.values()) - sum(beside.values())
    if tensor_bytes:
        yield "tensors at the peak", format_bytes(tensor_bytes)
    for name, size in beside.items():
        yield _SUMMANDS[name], format_bytes(size)
    yield "= needs", f"{format_bytes(memory.device_bytes)}, ±{100 * memory.error:.0f} %"
    yield "  to spare", bytes_or_dash(estimate.spare_bytes)
    varied = "not traced" if memory.varied_bytes is None else format_bytes(memory.varied_bytes)
    yield "  varied lengths add up to", varied
    yield "  host memory", format_bytes(memory.host_bytes)
    if memory.machine_bytes != memory.host_bytes:
        yield "  host memory of a machine", format_bytes(memory.machine_bytes)


def _times(explanation: Explanation, estimate: Estimate) -> Iterator[doc.Block]:
    if estimate.memory is None or estimate.memory.step_seconds is None:
        yield doc.Paragraph(f"Not predicted: {_untimed_text(explanation)}.")
        return
    each = [(_part_text(time.part), time.seconds, time.times) for time in explanation.times]
    rows = [(part, format_seconds(one), f"{times:,}", format_seconds(one * times)) for part, one, times in each]
    rows.append(("optimizer step", "", "", format_seconds(estimate.memory.step_seconds)))
    yield doc.Table(("part of the step", "time of one", "count", "total"), tuple(rows), total=len(rows) - 1)
    rate = predicted_rate(estimate, rate_or_dash(estimate.tokens_per_second))
    yield doc.Paragraph(f"= {rate} of the dataset, padding excluded")


def _untimed_text(explanation: Explanation) -> str:
    """Return the reason why no time of a step is predicted."""
    plan = explanation.training_plan
    if not explanation.times:
        return "the speed of the device is not known"
    if plan.args.get("use_vllm"):
        return "how long vLLM generates is not known"
    if plan_impact(plan).untimed:
        return "a part of the step runs on the host, whose time is not known"
    return "only the largest micro-batches were traced, since it does not fit"


def _part_text(part: Part) -> str:
    if part == Part(CONSTRUCTION, Occurrence.BEFORE):
        return "construction, earlier steps"
    words = {Occurrence.FIRST: f"first {part.phase}", Occurrence.FURTHER: f"further {part.phase}"}
    return words.get(part.occurrence, part.phase)


def _shape_text(shape: Shape) -> str:
    mismatched = f", mismatched pairs of {_tokens_text(shape.second_tokens)}" if shape.second_tokens else ""
    filled = f", {format_share(shape.filled)} not padding" if shape.filled < 1 else ""
    return f"{plural(shape.rows, 'row')} of {_tokens_text(shape.tokens)}{mismatched}{filled}"


def _tokens_text(tokens: float) -> str:
    return f"{tokens:,.0f} tokens"


def _fields_text(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(fields.items())) or "TRL's defaults"
