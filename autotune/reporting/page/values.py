"""What a page shows, as values: computed once from a result or a plan, the same for HTML and Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autotune.core.length_report import LengthBin
from autotune.reporting.comparison import Cost, Row
from autotune.reporting.phases import PhaseRow
from autotune.reporting.steps import Step
from autotune.reporting.words import BASELINE_NAME

_UNITS = {"timeout": "s", "memory_budget": "B"}
"""Units of what the API takes as a number and the command with a unit."""


@dataclass(frozen=True)
class Point:
    """A candidate whose memory and speed are known.

    Attributes:
        label: what the figures are of, such as a trial.
        role: ``recommended``, ``default`` or ``other``.
        on_front: whether no other one is at least as fast and needs less memory.
    """

    name: str
    label: str
    peak_bytes: int
    tokens_per_second: float
    role: str
    on_front: bool


@dataclass(frozen=True)
class Contributed:
    """What one choice of the recommendation contributed, in words, and as factors where they were measured.

    Attributes:
        told_apart: whether the speed-up is more than chance explains, or that is not known.
    """

    choice: str
    instead_of: str
    measured: str
    speedup: float | None
    peak_bytes_saved: int | None
    told_apart: bool


@dataclass(frozen=True)
class Predicted:
    """A figure of a probe as it was predicted before it ran, and as it was measured."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class TableRow:
    """A candidate in the table.

    Attributes:
        outcome: in words, one of a few.
        cells: its figures, in words.
        reason: why it was not tried, or how it ended; empty without one.
    """

    number: str
    name: str
    outcome: str
    cells: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Table:
    """The candidates that are shown one by one.

    Attributes:
        said: how many there are of which outcome.
        number: what they are numbered by.
        columns: of their figures.
        last: what the last column has: the candidate, and the reason.
    """

    title: str
    said: str
    number: str
    columns: tuple[str, ...]
    last: str
    rows: tuple[TableRow, ...]

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Those that there are, in the order of the alphabet."""
        return tuple(sorted({row.outcome for row in self.rows}))


@dataclass(frozen=True)
class Histogram:
    """How many rows of the dataset are about so long.

    Attributes:
        bins: those of ``autotune lengths``.
        cut: the length at which the chosen candidate cuts or drops rows; None where it does not.
    """

    bins: tuple[LengthBin, ...]
    cut: int | None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.bins[-1].high


@dataclass(frozen=True)
class Edited:
    """The user's own file, and what the recommendation changes in it.

    Attributes:
        file: as the user named it.
        costs: what it sets and costs most.
        diff: the lines of the difference, each with its mark in front.
    """

    file: str
    costs: tuple[Cost, ...]
    diff: tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """How a kind of page calls what it shows.

    Attributes:
        chosen: the candidate that it is about, in a legend.
        subject: the same in a sentence.
        memory: the memory of a candidate.
        facts: title of the facts.
        again: introduces the command that makes the page again.
        beside: the baseline.
    """

    chosen: str
    subject: str
    memory: str
    facts: str
    again: str
    beside: str = BASELINE_NAME


@dataclass(frozen=True)
class Values:
    """Everything that a page shows, from top to bottom.

    Attributes:
        title: of the page.
        verdict: the result in a sentence.
        good: whether something was found.
        choices: of the chosen candidate, where they differ from TRL's default.
        remarks: what is to be known of the verdict, in sentences.
        command: that trains as recommended, or None.
        figures: the chosen candidate beside TRL's default.
        steps: the memory of the two through one step, as far as it is known.
        untraced: why it is not known of one of them, in a sentence; empty where it is.
        phases: memory and time of the phases of the recommendation; empty where the phases were not told apart.
        budget_bytes: what a candidate may need.
        edited: None where the search did not start from a file.
        lengths: None where they are not known.
        lists: sentences under titles; empty lists are not shown.
        facts: about the run, by name.
        repeated: the command that makes the same again.
    """

    words: Words
    title: str
    verdict: str
    good: bool
    choices: str
    remarks: tuple[str, ...]
    command: str | None
    figures: tuple[Row, ...]
    steps: tuple[Step, ...]
    untraced: str
    phases: tuple[PhaseRow, ...]
    points: tuple[Point, ...]
    budget_bytes: int
    contributions: tuple[Contributed, ...]
    edited: Edited | None
    lengths: Histogram | None
    memory: tuple[Predicted, ...]
    speed: tuple[Predicted, ...]
    table: Table
    lists: tuple[tuple[str, tuple[str, ...]], ...]
    facts: tuple[tuple[str, str], ...]
    repeated: str


def histogram(bins: tuple[LengthBin, ...], cut: int | None) -> Histogram | None:
    """Return the histogram of row lengths, None without any; a length that cuts nothing is no cut."""
    return Histogram(bins, cut if cut is not None and cut < bins[-1].high else None) if bins else None


def front(sizes: Sequence[tuple[int, float]]) -> tuple[bool, ...]:
    """Return which pairs of peak and rate lie on the Pareto front: nothing needs less memory and is as fast."""
    order = sorted(range(len(sizes)), key=lambda place: (sizes[place][0], -sizes[place][1]))
    best = [0.0, *accumulate((sizes[place][1] for place in order), max)]
    on_front = {place for place, before in zip(order, best, strict=False) if sizes[place][1] > before}
    return tuple(place in on_front for place in range(len(sizes)))


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
