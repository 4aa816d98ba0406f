"""Writes a report as Markdown, for a pull request or a model card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from autotune.reporting.comparison import costs_title
from autotune.reporting.page.values import Edited, Values
from autotune.reporting.words import said_bytes, said_rate

# What Markdown or the HTML in it would read as more than text.
_MARKS = re.compile(r"([\\`*_\[\]<>#|~&])")


def markdown_page(shown: Values) -> str:
    """Return values as Markdown. Whatever comes from outside is escaped."""
    return "\n".join(_lines(shown)) + "\n"


def _lines(shown: Values) -> Iterator[str]:
    yield from _verdict(shown)
    if shown.figures:
        rows = [[row.label.strip(), row.recommended, row.baseline] for row in shown.figures]
        beside = shown.words.beside
        yield from _section(f"Beside {beside}", _table(["", shown.words.chosen, beside], rows))
    if shown.contributions:
        chosen = [[_code(item.choice), _code(item.instead_of), _text(item.measured)] for item in shown.contributions]
        yield from _section("What it chose", _table(["choice", "changed back to", "measured"], chosen, escaped=True))
    if shown.edited is not None:
        yield from _file(shown.edited)
    yield from _best(shown)
    yield from _section(shown.table.title, [_text(shown.table.said)])
    for title, lines in shown.lists:
        if lines:
            yield from _section(title, [f"- {_text(line)}" for line in lines])
    yield from _section(shown.words.facts, [f"- {_text(name)}: {_text(value)}" for name, value in shown.facts])
    yield from ("", f"{shown.words.again} {_code(shown.repeated)}")


def _verdict(shown: Values) -> Iterator[str]:
    yield f"# {_text(shown.verdict)}"
    yield ""
    if shown.choices:
        yield f"{_code(shown.choices)}"
        yield ""
    for remark in shown.remarks:
        yield _text(remark)
    if shown.command:
        yield ""
        yield f"Train with {_code(shown.command)}."


def _file(shown: Edited) -> Iterator[str]:
    if shown.costs:
        told = [f"- {_code(cost.written)} {_text(cost.said)}" for cost in shown.costs]
        yield from _section(_text(costs_title(shown.file)), told)
    if shown.diff:
        yield from _section(f"What changes in {_text(shown.file)}", _fenced(shown.diff, "diff"))


def _best(shown: Values) -> Iterator[str]:
    best = sorted((point for point in shown.points if point.on_front), key=lambda point: point.peak_bytes)
    rows = [[said_bytes(one.peak_bytes), said_rate(one.tokens_per_second), one.name] for one in best]
    if rows:
        yield from _section(
            "Nothing needs less memory and is as fast", _table([shown.words.memory, "speed", "candidate"], rows)
        )


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield from lines


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, escaped: bool = False) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row if escaped else map(_text, row))} |"


def _fenced(lines: Sequence[str], language: str) -> Iterator[str]:
    """Yield lines as they are, between more backticks than any of them has in a row."""
    fence = "`" * max(3, _longest_ticks("\n".join(lines)) + 1)
    yield f"{fence}{language}"
    yield from lines
    yield fence


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _text(text: str) -> str:
    return _MARKS.sub(r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Return text as code: between more backticks than it has in a row."""
    fence, space = "`" * (_longest_ticks(text) + 1), " " if "`" in text else ""
    return f"{fence}{space}{' '.join(text.split()).replace('|', chr(92) + '|')}{space}{fence}"
