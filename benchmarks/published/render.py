"""A public table and its traces as Markdown: each row's error, and the distribution of errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from benchmarks.published.tables import Outcome, Row, Table

_GB = 1e9
_SECONDS = "step"
"""The figure that is a time; all others are bytes."""


def rendered(table: Table, rows: Sequence[tuple[Row, Outcome]], versions: str) -> str:
    """Return the table with its errors.

    Args:
        rows: what became of each.
        versions: of the software that was traced.
    """
    return "\n".join(
        (
            *head(table, versions),
            *_body(table, rows),
            "",
            *_statistics(table, rows),
            *listed("What the larger errors are", table.explained),
        )
    )


def errors(table: Table, rows: Sequence[tuple[Row, Outcome]], figure: str) -> dict[str, float]:
    """Return the relative errors of one figure by the name of the row; without the one that was calibrated on."""
    return {
        row.name: outcome.traced[figure] / published - 1
        for row, outcome in rows
        if row.name != table.calibrated_on and figure in outcome.traced and (published := row.published.get(figure))
    }


def head(table: Table, versions: str) -> Iterator[str]:
    """Yield the description of a table: its origin, its measurements, and the assumptions."""
    yield f"## {table.name}\n"
    yield f"Published at <{table.url}>. {table.source}\n"
    yield f"- Measured on {table.hardware} with {table.software}."
    yield f"- Traced with {versions}."
    for name, meaning in table.figures.items():
        yield f"- `{name}` is {meaning}."
    yield from listed("What is assumed of the run", table.assumed)
    yield from listed("What is not known of it, or not traced", table.unknown)
    yield ""


def listed(title: str, sentences: Sequence[str]) -> Iterator[str]:
    """Yield a list of sentences under a title, or nothing where there are none."""
    if sentences:
        yield f"\n{title}:\n"
        yield from (f"- {sentence}" for sentence in sentences)


def _body(table: Table, rows: Sequence[tuple[Row, Outcome]]) -> Iterator[str]:
    figures = tuple(table.figures)
    yield "| row | " + " | ".join(f"{name}, published | traced | error" for name in figures) + " | remarks |"
    yield "|---|" + "--:|--:|--:|" * len(figures) + "---|"
    for row, outcome in rows:
        cells = [cell for name in figures for cell in _cells(name, row.published, outcome.traced.get(name))]
        yield f"| {row.name} | {' | '.join(cells)} | {_remarks(table, row, outcome)} |"


def _cells(name: str, row: Mapping[str, float | None], traced: float | None) -> tuple[str, str, str]:
    if name not in row:
        return ("—",) * 3
    published = row[name]
    return (
        "out of memory" if published is None else _shown(name, published),
        "—" if traced is None else _shown(name, traced),
        "—" if traced is None or published is None else f"{traced / published - 1:+.2%}",
    )


def _shown(name: str, figure: float) -> str:
    return f"{figure:.2f} s" if name == _SECONDS else f"{figure / _GB:.2f} GB"


def _remarks(table: Table, row: Row, outcome: Outcome) -> str:
    if outcome.failure:
        return f"not traced: {outcome.failure}".replace("|", "/")
    remarks = []
    if row.name == table.calibrated_on:
        remarks.append("calibrated on")
    if outcome.trainable != row.trainable:
        remarks.append(f"{outcome.trainable:,} trainable parameters, published {row.trainable:,}")
    if table.memory_bytes is not None and None in row.published.values():
        fits = max(outcome.traced.values()) <= table.memory_bytes
        remarks.append("traced to fit" if fits else "traced not to fit")
    return "; ".join(remarks)


def _statistics(table: Table, rows: Sequence[tuple[Row, Outcome]]) -> Iterator[str]:
    for figure in table.figures:
        found = errors(table, rows, figure)
        if found:
            sizes = sorted(abs(error) for error in found.values())
            worst = max(found, key=lambda name: abs(found[name]))
            within = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
            yield (
                f"`{figure}`: {len(sizes)} rows, median error {median(sizes):.2%}, 95th percentile {within:.2%}, "
                f"worst {found[worst]:+.2%} ({worst}); "
                f"{sum(error < 0 for error in found.values())} are predicted too low.\n"
            )
    failed = sum(bool(outcome.failure) for _, outcome in rows)
    seconds = sum(outcome.seconds for _, outcome in rows)
    yield f"{len(rows)} rows, {failed} of them not traced. {seconds:.0f} s of tracing in all."
