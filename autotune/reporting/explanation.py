"""``autotune plan --explain`` in a terminal: the stages of one estimate, from the training plan to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.core.batch_geometry import Shape, Typical
from autotune.core.estimate import Estimate, Plan
from autotune.core.explanation import Explanation, PartTime, Subject, TracedPoint
from autotune.core.program import CONSTRUCTION, MICRO_BATCH
from autotune.core.timeline import Occurrence, Part
from autotune.reporting.plan_words import BASIS, said_choices
from autotune.reporting.words import BASELINE_NAME, said_bytes, said_rate
from autotune.units import format_bytes, format_seconds, format_share

_Row = tuple[str, str]
_SUBJECTS = {
    Subject.FASTEST: "the fastest that fits",
    Subject.BASELINE: f"{BASELINE_NAME}, since nothing fits,",
}


def drawn_explanation(explanation: Explanation, plan: Plan) -> Iterable[RenderableType]:
    """Return the stages of an estimate, top to bottom."""
    everything = (*plan.estimates, plan.baseline)
    estimate = next(estimate for estimate in everything if estimate.candidate == explanation.candidate)
    yield Text(f"How the estimate of {_SUBJECTS[explanation.subject]} came about", style="bold")
    yield Padding(Text(said_choices(explanation.candidate, plan)), (0, 0, 0, 2), expand=False)
    yield from _stage("Training plan", _pairs(_plan_rows(explanation)))
    yield from _stage("Documents and batch geometry", _pairs(_geometry_rows(explanation, plan)))
    if not explanation.traces:
        yield from _stage("Traces", Text(f"None: {estimate.reason}"))
        return
    yield from _stage(f"Traces ({BASIS[estimate.origin]})", *_traces(explanation))
    whole = f"{explanation.layers} layers, {_said_shape(explanation.geometry.worst)}"
    yield from _stage(
        f"Extrapolated to {whole}: the most bytes of tensors in each part of the step", _peaks(explanation)
    )
    yield from _stage("Memory of the device", _pairs(_memory_rows(explanation, estimate)))
    yield from _stage("Time of a typical optimizer step", *_times(explanation, estimate))


def _stage(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, style="bold")
    for part in parts:
        yield Padding(part, (0, 0, 0, 2), expand=False)


def _pairs(rows: Iterable[_Row]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    return grid


def _figures(*titles: str) -> Table:
    """Return a table whose first column is words and whose others are figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if table.columns else "left", overflow="fold")
    return table


def _plan_rows(explanation: Explanation) -> Iterator[_Row]:
    plan = explanation.training_plan
    yield "trainer", plan.trainer
    yield "args", _said_fields(plan.args)
    yield "model", _said_fields(plan.model)
    if plan.truncate_to is not None:
        yield "rows are cut beforehand to", _said_tokens(plan.truncate_to)
    if plan.launch.processes > 1:
        yield "processes", str(plan.launch.processes)


def _geometry_rows(explanation: Explanation, plan: Plan) -> Iterator[_Row]:
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


def _traces(explanation: Explanation) -> Iterator[RenderableType]:
    points = explanation.traces
    new = sum(point.new for point in points)
    yield Text(f"{_said_count(len(points), 'trace', 'traces')}, {new} run now, {len(points) - new} from the cache")
    yield _points(points)
    if not explanation.aligned:
        yield Text("Moments differ between the traces, so that only their peaks were followed.")
    assumed = Counter(what for point in points for what in point.assumptions)
    for what, traces in sorted(assumed.items()):
        yield Text(f"Assumed in {traces} of {len(points)}: {what}")


def _points(points: Sequence[TracedPoint]) -> Table:
    table = _figures("layers, micro-batch", "weight", "tensors", "allocated", "reserved", "")
    for point in points:
        table.add_row(
            f"{point.layers}, {_said_shape(point.shape)}",
            f"{round(point.weight, 3) + 0.0:+.3f}",
            format_bytes(point.tensor_bytes),
            format_bytes(point.allocated_bytes),
            said_bytes(point.reserved_bytes),
            "new" if point.new else "cache",
        )
    return table


def _peaks(explanation: Explanation) -> Table:
    highest = explanation.peak
    table = _figures("part of the step", "tensors", "of these")
    table.columns[-1].justify = "left"
    for peak in explanation.peaks:
        ordered = sorted(peak.categories.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in ordered)
        direction = ", backward" if peak.backward else ", forward"
        name = _said_part(peak.part) + (direction if peak.part.phase == MICRO_BATCH else "")
        mark, style = ("  <- peak", "bold") if peak is highest else ("", "")
        table.add_row(f"{name}{mark}", format_bytes(peak.total_bytes), parts, style=style)
    return table


def _memory_rows(explanation: Explanation, estimate: Estimate) -> Iterator[_Row]:
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


def _times(explanation: Explanation, estimate: Estimate) -> Iterator[RenderableType]:
    if not explanation.times or estimate.memory is None or estimate.memory.step_seconds is None:
        yield Text("Not predicted: the speed of the device is not known.")
        return
    table = _figures("part of the step", "seconds", "times", "together")
    for time in explanation.times:
        table.add_row(*_time_cells(time))
    table.add_section()
    table.add_row("optimizer step", "", "", format_seconds(estimate.memory.step_seconds))
    yield table
    yield Text(f"= {said_rate(estimate.tokens_per_second)} of the dataset, padding excluded")


def _time_cells(time: PartTime) -> Sequence[str]:
    return (
        _said_part(time.part),
        format_seconds(time.seconds),
        f"{time.times:,}",
        format_seconds(time.seconds * time.times),
    )


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
