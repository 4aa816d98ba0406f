"""``autotune plan`` in a terminal: the fastest that fits, the candidates, and what their memory goes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.core.estimate import Change, Estimate, MemoryEstimate, Origin, Plan
from autotune.core.gpu import Gpu
from autotune.report.words import BASELINE_NAME, MISSING, said, said_bytes, said_rate
from autotune.units import GIB, format_bytes, format_share

_COLORS = {
    "parameter": "blue",
    "gradient": "magenta",
    "optimizer state": "yellow",
    "activation": "green",
    "temporary": "cyan",
    "fragmentation": "red",
    "context": "white",
}
_OTHERS = "others"
_OTHERS_COLOR = "bright_black"
_WIDEST_BAR = 60
_MEASURES_WIDTH = 40


def show_plan(plan: Plan, console: Console, top: int) -> None:
    """Print a plan, with the ``top`` best candidates."""
    for part in drawn_plan(plan, console.width, top):
        console.print(part)


def drawn_plan(plan: Plan, width: int, top: int) -> Iterable[RenderableType]:
    """Return the parts of a plan for a console of ``width`` characters, top to bottom."""
    shown = _distinct(plan.estimates)[:top]
    yield Text.assemble((plan.model, "bold"), f" on {plan.dataset}, global batch {plan.global_batch_size}, for ",
                        (plan.gpu.name, "bold"), f" with {format_bytes(plan.budget_bytes)}")  # fmt: skip
    yield Text()
    yield headline(plan)
    yield Text()
    if shown:
        yield _table(plan, shown)
        yield Text()
        yield from _bars(plan, shown, min(_WIDEST_BAR, max(10, width - _MEASURES_WIDTH)))
    for change in plan.changes:
        if change.candidate in [plan.baseline.candidate, *(estimate.candidate for estimate in shown)]:
            yield Text(said_change(change, plan))
    if plan.changes:
        yield Text()
    for note in plan.notes:
        yield Text(f"note: {note}")
    fitting = sum(estimate.fits for estimate in plan.estimates)
    yield Text(
        f"{len(plan.estimates)} candidates, of which {fitting} are predicted to fit; {plan.trace_count} traces, "
        f"{plan.new_trace_count} of them new, in {plan.wall_seconds:.1f} s"
    )


def _distinct(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return one estimate of each memory and rate: choices such as padding may change nothing on some rows."""
    kept: dict[tuple[object, ...], Estimate] = {}
    for estimate in estimates:
        memory = estimate.memory
        figures = memory and (memory.peak_bytes, memory.reserved_bytes, memory.host_bytes)
        kept.setdefault((figures, estimate.tokens_per_second, estimate.reason), estimate)
    return list(kept.values())


def headline(plan: Plan) -> Text:
    """Return in one sentence what is predicted to be best."""
    best = plan.fastest
    if best is None or best.spare_bytes is None:
        return Text("Nothing is predicted to fit.", style="bold red")
    rate = f" {said_rate(best.tokens_per_second)}" if best.tokens_per_second is not None else ""
    what = "The fastest that fits" if best.tokens_per_second is not None else "What needs least"
    words = said(best.candidate, plan.baseline.candidate)
    return Text(f"{what}:{rate} with {format_bytes(best.spare_bytes)} to spare: {words}", style="bold green")


def said_change(change: Change, plan: Plan) -> str:
    """Return in one sentence what makes a candidate fit."""
    words = said(change.candidate, plan.baseline.candidate)
    made = " ".join(
        f"{knob}={choice}" for knob, choice in change.instead.candidate.differences(change.candidate).items()
    )
    return f"{words} does not fit; with {made} it does, with {said_bytes(change.instead.spare_bytes)} to spare."


def _table(plan: Plan, shown: Sequence[Estimate]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("", "tok/s", "allocated", "reserved", "device", "host", "to spare", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("candidate", overflow="fold")
    listed = [(str(number), estimate) for number, estimate in enumerate(shown, 1)]
    if plan.baseline not in shown:
        listed.append((MISSING, plan.baseline))
    for number, estimate in listed:
        table.add_row(number, *_figures(estimate), said(estimate.candidate, plan.baseline.candidate))
    return table


def _figures(estimate: Estimate) -> tuple[str | Text, ...]:
    memory = estimate.memory
    if memory is None:
        return (MISSING,) * 7
    spare = Text(said_bytes(estimate.spare_bytes), style="green" if estimate.fits else "red")
    sign = "±" if estimate.origin is Origin.TRACED else "about ±"
    return (
        said_rate(estimate.tokens_per_second),
        format_bytes(memory.peak_bytes),
        said_bytes(memory.reserved_bytes),
        format_bytes(memory.device_bytes),
        format_bytes(memory.host_bytes),
        spare,
        sign + format_share(memory.error),
    )


def _bars(plan: Plan, shown: Sequence[Estimate], width: int) -> Iterable[RenderableType]:
    drawn = [
        ("best" if number == 0 else BASELINE_NAME, estimate)
        for number, estimate in enumerate((shown[0], plan.baseline))
    ]
    scale = max([plan.budget_bytes, *(item.memory.device_bytes for _, item in drawn if item.memory is not None)])
    for name, estimate in drawn:
        if estimate.memory is not None:
            yield Text.assemble(f"{name:>13} ", breakdown_bar(estimate.memory, scale, width))
    legend = Text(" " * 14)
    for category, color in (*_COLORS.items(), (_OTHERS, _OTHERS_COLOR)):
        legend.append("█ ", style=color)
        legend.append(f"{category}  ")
    yield legend
    yield Text()


def breakdown_bar(memory: MemoryEstimate, scale_bytes: int, width: int) -> Text:
    """Return a bar whose whole ``width`` in characters stands for ``scale_bytes``, divided as the memory is."""
    sizes = {category: memory.breakdown.get(category, 0) for category in _COLORS}
    sizes[_OTHERS] = memory.device_bytes - sum(sizes.values())
    bar = Text()
    seen = 0
    for category, size in sizes.items():
        before, seen = seen, seen + size
        cells = round(seen / scale_bytes * width) - round(before / scale_bytes * width)
        bar.append("█" * cells, style=_COLORS.get(category, _OTHERS_COLOR))
    bar.append("·" * max(0, width - len(bar)), style=_OTHERS_COLOR)
    return bar.append(f" {format_bytes(memory.device_bytes)}")


def show_gpus(gpus: Sequence[Gpu], console: Console) -> None:
    """Print the catalogue of GPUs."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("GPU", "GiB", "GB/s", "bf16", "fp16", "tf32", "fp32", "PCIe", "NVLink", "context", ""):
        table.add_column(title, justify="left" if title == "GPU" else "right", no_wrap=True)
    for gpu in gpus:
        speeds = gpu.speeds
        rates = (speeds.bf16, speeds.fp16, speeds.tf32, speeds.fp32) if speeds else (None,) * 4
        table.add_row(
            gpu.name,
            f"{gpu.memory_bytes / GIB:.1f}",
            MISSING if speeds is None else f"{speeds.bandwidth / 1e9:.0f}",
            *(MISSING if rate is None else f"{rate / 1e12:.0f}" for rate in rates),
            MISSING if speeds is None else f"{speeds.pcie / 1e9:.0f}",
            MISSING if speeds is None or speeds.nvlink is None else f"{speeds.nvlink / 1e9:.0f}",
            f"{gpu.context_bytes / GIB:.2f}",
            "" if gpu.verified else "unverified",
        )
    console.print(table)
    console.print(
        Text("Memory and context in GiB; peaks without sparsity in 1e12 operations, links in 1e9 bytes per second.")
    )
