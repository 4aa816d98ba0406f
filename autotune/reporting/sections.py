"""The sections that the reports about a search and about a plan share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from autotune.core.length_report import LengthBin
from autotune.reporting.document import Bar, Cell, Facts, Histogram, Medium, Section, Snippet, Table
from autotune.reporting.words import MISSING

_UNITS = {"timeout": "s", "memory_budget": "B"}
"""Units of what the API takes as a number and the command with a unit."""
_Compared = TypeVar("_Compared")


@dataclass(frozen=True)
class Property(Generic[_Compared]):
    """A property of the chosen candidate and the baseline.

    Attributes:
        text: its value in words.
        size: its value as a number, for a bar; None without bars.
        whole: the value of a full bar; None for the greater of the two.
    """

    label: str
    text: Callable[[_Compared], str]
    size: Callable[[_Compared], float | None] = lambda _: None
    whole: float | None = None


def compared(
    chosen: _Compared, baseline: _Compared | None, properties: Iterable[Property[_Compared]]
) -> tuple[tuple[Cell, ...], ...]:
    """Return a row for each property of the two, with bars; properties known of neither are left out."""
    both, rows = (chosen, baseline), []
    for one in properties:
        texts = [MISSING if each is None else one.text(each) for each in both]
        sizes = [None if each is None else one.size(each) for each in both]
        whole = one.whole or max((size for size in sizes if size is not None), default=0.0)
        bars = [
            Bar(size / whole if size is not None and whole else None, role)
            for size, role in zip(sizes, ("recommended", "default"), strict=True)
        ]
        if texts != [MISSING, MISSING]:
            rows.append((one.label, texts[0], bars[0], texts[1], bars[1]))
    return tuple(rows)


def compared_section(
    baseline: str, chosen: str, rows: tuple[tuple[Cell, ...], ...], medium: Medium = Medium.EVERYWHERE
) -> Iterator[Section]:
    """Yield the chosen candidate and the baseline, by their names, in one table with bars; nothing without rows."""
    if rows:
        yield Section(f"Compared with {baseline}", (Table(("", chosen, "", baseline, ""), rows),), medium)


def closing(title: str, facts: Iterable[tuple[str, str]], lead: str, command: str) -> Section:
    """Return the facts about a run, and the command that repeats it."""
    return Section(title, (Facts(tuple(facts)), Snippet(lead, command)), Medium.PAGES)


def histogram(bins: tuple[LengthBin, ...], cut: int | None, subject: str) -> Histogram | None:
    """Return the histogram of row lengths, None without any; a length that cuts nothing is no cut."""
    return Histogram(bins, cut if cut is not None and cut < bins[-1].high else None, subject) if bins else None


def command_again(command: str, settings: Mapping[str, object]) -> str:
    """Return the command of a run or a plan, from what was asked for, by the names of the API's parameters.

    ``model`` and ``dataset`` go without a name.
    """
    words = ["autotune", command, *(str(settings[name]) for name in ("model", "dataset") if settings.get(name))]
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        match value:
            case _ if name in ("model", "dataset") or value is None:
                pass
            case bool():
                words.append(option if value else f"--no-{option[2:]}")
            case Mapping():
                words += [word for knob, choice in value.items() for word in _option(option, f"{knob}={choice}")]
            case list() | tuple():
                words += _option(option, ",".join(map(str, value))) if value else []
            case _:
                words += _option(option, f"{value}{'' if isinstance(value, str) else _UNITS.get(name, '')}")
    return shlex.join(words)


def _option(name: str, value: str) -> list[str]:
    """Return the words of an option; a value that begins like one of its own is bound to its name."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def short(name: str) -> str:
    """Return the last part of a path or of a hub's id."""
    return name.rstrip("/").rpartition("/")[2] or name
