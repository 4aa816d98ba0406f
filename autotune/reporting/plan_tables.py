"""The two tables of ``autotune plan``: the candidates with their figures, and the breakdown of memory as bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.core.candidate import Candidate
from autotune.core.estimate import Change, Estimate, MemoryEstimate, Plan
from autotune.reporting.plan_words import BASIS, said_change, said_choices, smallest
from autotune.reporting.words import BASELINE_NAME, MISSING, bar, said_bytes
from autotune.units import format_bytes

_TITLES = ("", "needs", "to spare", "host", "tok/s", "")
_WIDTHS = (3, 10, 10, 10, 9)
_FIGURES_WIDTH = sum(_WIDTHS) + 2 * len(_WIDTHS) + max(map(len, BASIS.values()))
_INDENT = _WIDTHS[0] + 2
# With at least this many characters left, choices are shown beside the figures, otherwise below them.
_CHOICES_BESIDE = 40
# PyTorch's memory categories in the order of training, then those of the allocator and the driver.
_CATEGORIES = (
    "parameter", "buffer", "gradient", "optimizer state", "activation", "temporary", "rounding", "fragmentation",
    "context", "process",
)  # fmt: skip
_OTHER = "other"
_SMALLEST_SHARE = 1e-3
_CROWDED = 1 / 3
_WIDEST_BAR, _NARROWEST_BAR = 24, 5
# Width of the memory table without its bars: the longest category, two sizes, and the separators of five columns.
_BESIDE_BARS = 15 + 2 * 10 + 4 * 3


def candidates(plan: Plan, shown: Sequence[Estimate], width: int) -> Iterable[RenderableType]:
    """Return one line per estimate, the baseline last, each with its differences from the baseline."""
    listed = [(str(number), estimate) for number, estimate in enumerate(shown, 1)]
    if plan.baseline.candidate not in [estimate.candidate for estimate in shown]:
        listed.append((MISSING, plan.baseline))
    changes = {change.candidate: change for change in plan.changes}
    rows = [(Text(_TITLES_LINE, style="bold"), Text(f"what differs from {BASELINE_NAME}", style="bold"))]
    rows += [(_figures(number, estimate), _choices(plan, estimate, changes)) for number, estimate in listed]
    yield Text()
    if width < _FIGURES_WIDTH + 2 + _CHOICES_BESIDE:
        for figures, choices in rows:
            yield figures
            yield Padding(choices, (0, 0, 0, _INDENT), expand=False)
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    yield grid


def _line(cells: Sequence[str]) -> str:
    *figures, last = cells
    return "".join(f"{cell:>{size}}  " for cell, size in zip(figures, _WIDTHS, strict=True)) + last


_TITLES_LINE = _line(_TITLES)


def _figures(number: str, estimate: Estimate) -> Text:
    memory, rate = estimate.memory, estimate.tokens_per_second
    cells = [
        number,
        said_bytes(memory.device_bytes if memory is not None else None),
        said_bytes(estimate.spare_bytes),
        said_bytes(memory.host_need_bytes if memory is not None else None),
        MISSING if rate is None else f"{rate:,.0f}",
        BASIS[estimate.origin],
    ]
    return Text(_line(cells), style="" if estimate.fits else "red")


def _choices(plan: Plan, estimate: Estimate, changes: Mapping[Candidate, Change]) -> Text:
    text = Text(said_choices(estimate.candidate, plan))
    change = changes.get(estimate.candidate)
    if change is not None:
        text.append(f"\n{said_change(change)}", style="green")
    return text


def breakdown(plan: Plan, width: int) -> Iterable[RenderableType]:
    """Return the memory breakdown of the best candidate and the baseline; nothing where neither is known."""
    best = plan.fastest or smallest(plan)
    columns = {} if best is None else {"fastest" if best.fits else "least": best.memory}
    if best is None or best.candidate != plan.baseline.candidate:
        columns["default"] = plan.baseline.memory
    known = {name: memory for name, memory in columns.items() if memory is not None}
    if not known:
        return
    needs = [memory.device_bytes for memory in known.values()]
    most_bytes = max(needs)
    # For sizes far below the budget, bars relative to the budget would be empty.
    scale_bytes = max(plan.budget_bytes, most_bytes) if most_bytes > plan.budget_bytes * _CROWDED else most_bytes
    bar_width = max(_NARROWEST_BAR, min(_WIDEST_BAR, (width - _BESIDE_BARS) // 2))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("memory at peak", no_wrap=True)
    for name, color in zip(known, ("green", "cyan"), strict=False):
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", width=bar_width, no_wrap=True, style=color)
    for category, sizes in _parts(list(known.values())).items():
        table.add_row(category, *_cells(sizes, scale_bytes, bar_width))
    table.add_section()
    table.add_row("needs", *_cells(needs, scale_bytes, bar_width))
    if plan.budget_bytes <= scale_bytes:
        table.add_row("of", *_cells([plan.budget_bytes] * len(known), scale_bytes, bar_width))
    yield Text()
    yield table


def _parts(memories: Sequence[MemoryEstimate]) -> dict[str, list[int]]:
    """Return the sizes of each estimate by category; categories too small for a row are summed under "other"."""
    found = dict.fromkeys(_CATEGORIES) | dict.fromkeys(name for memory in memories for name in memory.breakdown)
    sizes = {name: [memory.breakdown.get(name, 0) for memory in memories] for name in found}
    small = max(memory.device_bytes for memory in memories) * _SMALLEST_SHARE
    shown = {name: parts for name, parts in sizes.items() if max(parts) >= small and name != _OTHER}
    others = [sum(parts) for parts in zip(*(sizes[name] for name in sizes if name not in shown), strict=True)]
    return {**shown, **({_OTHER: others} if any(others) else {})}


def _cells(sizes: Sequence[int], scale_bytes: int, bar_width: int) -> list[str]:
    return [
        cell for size in sizes for cell in (format_bytes(size) if size else MISSING, bar(size / scale_bytes, bar_width))
    ]
