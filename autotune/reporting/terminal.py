"""Draws a report in a terminal of any width; commands, paths and differences are not wrapped, so as to be copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import bar, box
from rich import table as tables
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from autotune.reporting import document as doc
from autotune.reporting.words import printable
from autotune.units import format_bytes

_COLOURS = {doc.Tone.PLAIN: "", doc.Tone.GOOD: "green", doc.Tone.UNSURE: "yellow", doc.Tone.BAD: "red"}
_BAR_COLOURS = {"recommended": "green", "default": "cyan", "other": "default"}
_DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
_INDENT = 2
_BARS, _NARROWEST_BAR = 56, 5
"""Characters of the bars of a row together, at most, and of one bar, at least."""
_MANY_COLUMNS = 6
_LONGEST_WORD = 16
_FIGURES = 10
"""Characters of a figure of a candidate, with the space after it."""
_CHOICES_INDENT = 5
_CHOICES_WIDTH = 48
"""Least width, in characters, for a candidate's choices to the right of its figures; else they are below them."""
MARKS = {"other": "·", "default": "○", "recommended": "●"}
"""The mark of each role; later ones are drawn over earlier ones."""
NARROWEST, WIDEST = 40, 100
"""Least and most characters of a line of the scatter plot; in a narrower terminal there is none."""
_HEIGHT = 9


def show(document: doc.Document, console: Console, *, apart: bool = False) -> None:
    """Print a report; ``apart``: after an empty line."""
    for number, part in enumerate(_sections(document, console.width)):
        if number or apart:
            console.print()
        for block in part:
            # The terminal itself breaks such lines, and joins them again when they are copied.
            lines = [block] if isinstance(block, Text) and block.no_wrap else _trimmed(block, console)
            for line in lines:
                console.print(line, soft_wrap=True)


def _sections(document: doc.Document, width: int) -> Iterator[list[RenderableType]]:
    if document.subject:
        yield [Text(printable(document.subject))]
    if document.verdict is not None:
        yield list(_verdict(document.verdict))
    for section in document.sections:
        drawn = list(_section(section, width)) if section.medium is not doc.Medium.PAGES else []
        if drawn:
            yield drawn


def _verdict(verdict: doc.Verdict) -> Iterator[RenderableType]:
    yield Text(printable(verdict.headline), style=f"bold {_COLOURS[verdict.tone]}".strip())
    if verdict.choices:
        yield _Hanging(Text(printable(verdict.choices), style="bold"), _INDENT)
    yield from _listing(doc.Listing(verdict.evidence))
    for remark in verdict.remarks:
        yield from _block(remark, 0)


def _section(section: doc.Section, width: int) -> Iterator[RenderableType]:
    """Yield the blocks of a section; under a heading, all of them are indented."""
    inner = width - _INDENT if section.heading else width
    drawn = [(block, part) for block in section.blocks for part in _block(block, inner)]
    if drawn and section.heading:
        yield Text(printable(section.title) + ":", style="bold")
    for block, part in drawn:
        indented = section.heading and isinstance(block, doc.Paragraph | doc.Table)
        yield _indented(part, _INDENT) if indented else part


def _block(block: doc.Block, width: int) -> Iterator[RenderableType]:
    match block:
        case doc.Paragraph():
            yield Text(printable(block.text), style=_COLOURS[block.tone])
        case doc.Listing():
            yield from _listing(block)
        case doc.Table():
            yield _table(block, width)
        case doc.Facts():
            yield _facts(block)
        case doc.Diff():
            yield from _diff(block)
        case doc.Snippet():
            yield Text.assemble(block.lead, (block.text, "bold"), no_wrap=True)
        case doc.Candidates():
            yield from _candidates(block, width)
        case doc.Plane():
            yield from _plane(block, width)


def _listing(block: doc.Listing) -> Iterator[RenderableType]:
    if block.lead:
        yield Text(printable(block.lead), style="bold")
    yield from (_Hanging(Text(_line_text(line), style=_COLOURS[block.tone])) for line in block.lines)


def _trimmed(block: RenderableType, console: Console) -> Iterator[Text]:
    """Yield the lines of a block without the spaces by which rich fills the cells of a table."""
    for parts in console.render_lines(block, pad=False):
        line = Text.assemble(*((part.text, part.style or "") for part in parts))
        line.rstrip()
        yield line


@dataclass(frozen=True)
class _Hanging:
    """A paragraph with a hanging indent."""

    text: Text
    further: int = 2 * _INDENT

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the wrapped lines."""
        for number, line in enumerate(self.text.wrap(console, max(1, options.max_width - self.further))):
            yield Text.assemble(" " * (self.further if number else _INDENT), line)


def _line_text(line: doc.Line) -> str:
    parts = (line,) if isinstance(line, str) else line
    return printable(" ".join(part if isinstance(part, str) else f"`{part.text}`" for part in parts))


def _table(table: doc.Table, width: int) -> tables.Table:
    narrow = len(table.columns) > _MANY_COLUMNS
    padding = (0, 1, 0, 0) if narrow else (0, 1)
    drawn = tables.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    kinds = table.kinds
    widths = [max(cell_len(_plain(cell)) for cell in column) for column in zip(table.columns, *table.rows, strict=True)]
    # One gap more than there are: otherwise rich before 15 wraps the first title.
    left = width - sum(widths) - (2 if narrow else 3) * len(widths)
    bars = kinds.count("bars")
    if bars and left < bars * _NARROWEST_BAR:
        # Words need the room.
        return _table(table.without_bars, width)
    bar_width = max(_NARROWEST_BAR, min(left, _BARS) // max(1, bars))
    sizes = [None] * len(widths) if bars or left >= 0 else _widths_of_cells(table, widths, left)
    for title, kind, cells_width in zip(table.columns, kinds, sizes, strict=True):
        justify: Literal["left", "right"] = "right" if kind == "figures" else "left"
        size = bar_width if kind == "bars" else cells_width
        # The name of a row is copied to a command, so other columns are wrapped first.
        whole = kind == "bars" or (narrow and kind == "words")
        drawn.add_column(title, justify=justify, overflow="fold", width=size, no_wrap=whole)
    for place, row in enumerate(table.rows):
        if place == table.total:
            drawn.add_section()
        drawn.add_row(*(_cell(cell, bar_width) for cell in row), style="bold" if place == table.marked else "")
    return drawn


def _widths_of_cells(table: doc.Table, widths: Sequence[int], left: int) -> Sequence[int | None]:
    """Return widths of columns that wrap titles and, if need be, texts, then figures, between words.

    None for each without room.

    Args:
        widths: those that wrap nothing.
        left: characters that these leave of a line, below 0.
    """
    columns = list(zip(table.kinds, table.columns, *table.rows, strict=True))
    names = "words" if len(columns) > _MANY_COLUMNS else ""
    least = list[int]()
    for wrapped in ((), ("words",), ("words", "figures")):
        least = [_least_width(title, each, wraps=kind in wrapped and kind != names) for kind, title, *each in columns]
        if sum(least) <= left + sum(widths):
            break
    room = left + sum(widths) - sum(least)
    if room < 0:
        return [None] * len(widths)
    # Titles come before texts, of which the longest gets the most room.
    for whole in (list(map(cell_len, table.columns)), widths):
        for place in sorted(range(len(widths)), key=lambda place: least[place] - whole[place]):
            added = min(max(0, whole[place] - least[place]), room)
            least[place] += added
            room -= added
    return least


def _least_width(title: str, cells: Iterable[doc.Cell], *, wraps: bool = False) -> int:
    """Return the least width of a column whose title is wrapped, and its texts between words if it ``wraps``.

    Names to copy are not wrapped, and of a text's longest words the beginning counts.
    """
    parts = title.split()
    for cell in cells:
        whole = isinstance(cell, doc.Code) or not wraps
        parts += [_plain(cell)] if whole else [word[:_LONGEST_WORD] for word in _plain(cell).split()]
    return max(map(cell_len, parts), default=0)


def _cell(cell: doc.Cell, bar_width: int) -> Text | bar.Bar:
    if isinstance(cell, doc.Bar):
        # rich rounds down to eighths of a character.
        size = 8 * bar_width
        return bar.Bar(size, 0, round((cell.share or 0.0) * size), width=bar_width, color=_BAR_COLOURS[cell.role])
    return Text(_plain(cell))


def _plain(cell: doc.Cell) -> str:
    if isinstance(cell, doc.Bar):
        return ""
    return printable(cell.text if isinstance(cell, doc.Code) else cell)


def _grid(rows: Iterable[tuple[Text, Text]]) -> tables.Table:
    grid = tables.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _facts(facts: doc.Facts) -> Padding:
    styles = dict.fromkeys(facts.unavailable, _COLOURS[doc.Tone.BAD])
    rows = ((Text(_plain(name)), Text(_plain(value), style=styles.get(name, ""))) for name, value in facts.pairs)
    return _indented(_grid(rows), _INDENT)


def _indented(part: RenderableType, indent: int) -> Padding:
    return Padding(part, (0, 0, 0, indent), expand=False)


def _diff(diff: doc.Diff) -> Iterator[Text]:
    """Yield the lines of a difference unwrapped, so that they can be copied."""
    for line in diff.lines:
        yield Text(" " * _INDENT + line, style=_DIFF_COLOURS.get(line[:1], ""), no_wrap=True)


def _candidates(block: doc.Candidates, width: int) -> Iterator[RenderableType]:
    if block.in_text:
        yield from _rows(block, width)
        yield Text()
    yield from _listing(doc.Listing(block.lines, block.counts))


def _rows(block: doc.Candidates, width: int) -> Iterator[RenderableType]:
    """Yield a line of figures for each candidate, with its choices to the right or below."""
    rows = [(Text(_figures("", block.columns), style="bold"), Text(block.last, style="bold"))]
    rows += [(Text(_figures(row.number, row.cells), style=_COLOURS[row.tone]), _choices(row)) for row in block.rows]
    if width >= max(figures.cell_len for figures, _ in rows) + 2 + _CHOICES_WIDTH:
        yield _grid(rows)
        return
    for figures, choices in rows:
        yield figures
        yield _indented(choices, _CHOICES_INDENT)


def _figures(number: str, cells: Sequence[str]) -> str:
    return "  ".join((f"{number:>3}", *(f"{cell:>{_FIGURES}}" for cell in cells)))


def _choices(row: doc.CandidateRow) -> Text:
    reason = f"\n{row.reason}" if row.reason else ""
    return Text.assemble(printable(row.name), (printable(reason), "green" if row.outcome.startswith("does") else ""))


def _plane(plane: doc.Plane, width: int) -> Iterator[Text]:
    if len(plane.points) < 2 or width - 2 < NARROWEST:
        return
    lines = scatter(plane, min(width - 2, WIDEST))
    roles = {point.role for point in plane.points}
    legend = "   ".join(f"{MARKS[role]} {name}" for role, name in plane.legend if role in roles)
    drawn = Text("\n".join([*lines, legend]), no_wrap=True)
    drawn.highlight_words([MARKS["recommended"]], "bold green")
    drawn.highlight_words([MARKS["default"]], "bold cyan")
    yield drawn


def scatter(plane: doc.Plane, width: int) -> list[str]:
    """Return the lines of a scatter plot: speed upwards, memory to the right, both from zero.

    The memory axis ends at the budget, unless all points are far below it or one is beyond it.

    Args:
        plane: has at least one point.
        width: characters in a line, at least :data:`NARROWEST`.
    """
    drawn, budget_bytes = plane.points, plane.budget_bytes
    end_bytes = doc.memory_axis((point.peak_bytes for point in drawn), budget_bytes)
    most_rate = max(point.tokens_per_second for point in drawn)
    right = end_bytes if end_bytes >= budget_bytes else max(1, round(end_bytes * 1.25))
    top = f"{most_rate:,.0f}"
    columns = width - len(top) - 3
    grid = [[" "] * columns for _ in range(_HEIGHT)]
    for point in sorted(drawn, key=lambda point: list(MARKS).index(point.role)):
        column = min(columns - 1, int(point.peak_bytes / right * columns))
        line = min(_HEIGHT - 1, int((1 - point.tokens_per_second / most_rate) * _HEIGHT))
        grid[line][column] = MARKS[point.role]
    marks = [top, *[""] * (_HEIGHT - 1)]
    lines = [f"{mark:>{len(top)}} ┤{''.join(cells)}".rstrip() for mark, cells in zip(marks, grid, strict=True)]
    end = f"{format_bytes(right)}{' = budget' if right == budget_bytes else ''}"
    return [
        f"{'tok/s':>{len(top)}}",
        *lines,
        f"{'0':>{len(top)}} └{'─' * (columns - 1)}┤",
        f"{'':>{len(top)}}  0{plane.memory:^{max(0, columns - 2 - len(end))}}{end:>{len(end)}}",
    ]
