"""Writes a report as Markdown, for a pull request or a model card; texts are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from autotune.reporting import document as doc
from autotune.units import format_bytes, format_rate

# Characters with a meaning in Markdown or in its HTML.
_MARKS = re.compile(r"([\\`*_\[\]<>#|~&])")


def markdown_page(document: doc.Document) -> str:
    """Return a report as Markdown."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: doc.Document) -> Iterator[str]:
    if document.verdict is not None:
        yield from _verdict(document.verdict, document.subject)
    for section in document.sections:
        if section.medium is not doc.Medium.TERMINAL:
            yield from _section(section)


def _verdict(verdict: doc.Verdict, subject: str) -> Iterator[str]:
    yield f"# {_text(verdict.headline)}"
    yield ""
    if verdict.choices:
        yield _code(verdict.choices)
        yield ""
    if subject:
        yield _text(subject)
    for remark in verdict.remarks:
        yield from ("", _text(remark.text))
    if verdict.command:
        yield ""
        yield f"Train with {_code(verdict.command)}."


def _section(section: doc.Section) -> Iterator[str]:
    blocks = [list(_block(block)) for block in section.blocks]
    if any(blocks):
        yield from ("", f"## {_text(section.title)}")
        for lines in filter(None, blocks):
            yield ""
            yield from lines


def _block(block: doc.Block) -> Iterator[str]:
    match block:
        case doc.Paragraph():
            yield _text(block.text)
        case doc.Listing():
            yield from _listing(block.lead, block.lines)
        case doc.Table():
            yield from _rows(block.without_bars.columns, block.without_bars.rows)
        case doc.Facts():
            yield from (f"- {_text(name)}: {_text(value)}" for name, value in block.pairs)
        case doc.Diff():
            yield from _diff_block(block.lines)
        case doc.Candidates():
            yield from _listing(block.counts, block.lines)
            if block.in_text:
                yield ""
                last = [f"{row.name} ({row.reason})" if row.reason else row.name for row in block.rows]
                rows = [(row.number, *row.cells, name) for row, name in zip(block.rows, last, strict=True)]
                yield from _rows([block.number, *block.columns, block.last], rows)
        case doc.Plane():
            yield from _front(block)


def _listing(lead: str, lines: Iterable[doc.Line]) -> Iterator[str]:
    if lead:
        yield from (_text(lead), "")
    yield from (f"- {_line(line)}" for line in lines)


def _front(plane: doc.Plane) -> Iterator[str]:
    rows = [[format_bytes(one.peak_bytes), format_rate(one.tokens_per_second), one.name] for one in plane.front]
    if rows:
        yield from _rows([plane.memory, "speed", "candidate"], rows)


def _rows(head: Sequence[str], rows: Iterable[Sequence[doc.Cell]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_text, head))} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(cell: doc.Cell) -> str:
    """Return a cell of a table; a vertical bar ends a cell even in code."""
    return _part(cell).replace("|", r"\|") if isinstance(cell, doc.Code) else _part(cell)


def _line(line: doc.Line) -> str:
    return _text(line) if isinstance(line, str) else " ".join(map(_part, line))


def _part(part: doc.Cell) -> str:
    if isinstance(part, doc.Bar):
        return ""
    return _code(part.text) if isinstance(part, doc.Code) else _text(part)


def _diff_block(lines: Sequence[str]) -> Iterator[str]:
    """Yield a code block of a difference, between more backticks than any of its lines has in a row."""
    fence = "`" * max(3, _longest_ticks("\n".join(lines)) + 1)
    yield f"{fence}diff"
    yield from lines
    yield fence


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _text(text: str) -> str:
    return _MARKS.sub(r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Return text as code: between more backticks than it has in a row."""
    fence, space = "`" * (_longest_ticks(text) + 1), " " if "`" in text else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"
