"""A report's content as sections of sentences and figures, which the terminal, HTML and Markdown writers draw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import TypeVar

from autotune.core.documents.memory_timeline import MemoryTimeline
from autotune.reporting.words import printable

_CROWDED = 1 / 3
"""Share of the budget up to which sizes would be too small to compare on an axis that ends at the budget."""


class Tone(StrEnum):
    """The tone of a sentence, which determines its colour."""

    PLAIN = "plain"
    GOOD = "good"
    UNSURE = "unsure"
    BAD = "bad"


TONES = {0: Tone.GOOD, 1: Tone.BAD, 2: Tone.BAD, 3: Tone.UNSURE}
"""The tone of an answer by the exit code of its command."""


class Medium(Enum):
    """The media that show a section: pages are HTML and Markdown."""

    EVERYWHERE = "everywhere"
    TERMINAL = "terminal"
    PAGES = "pages"


@dataclass(frozen=True)
class Code:
    """Text as it is written in a configuration or a command."""

    text: str


@dataclass(frozen=True)
class Bar:
    """A cell that is a bar.

    Attributes:
        share: of the full width, 0 to 1; None draws nothing.
        role: ``recommended``, ``default`` or ``other``, which decides its colour.
    """

    share: float | None
    role: str = "recommended"


Cell = str | Code | Bar
Line = str | tuple[str | Code, ...]
"""An item of a list, as text or as parts of text and code."""


@dataclass(frozen=True)
class Paragraph:
    """One sentence or a few."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Listing:
    """Lines below an introductory sentence, which may be empty."""

    lines: tuple[Line, ...]
    lead: str = ""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Attributes:
        columns: their titles.
        words: indices of the text columns, which are left-aligned; figures are right-aligned.
        marked: index of the highlighted row.
        total: index of the first row below a rule.
        stacked: whether a narrow page shows each row as a paragraph.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: tuple[int, ...] = (0,)
    marked: int | None = None
    total: int | None = None
    stacked: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each column: ``words``, ``figures`` or ``bars``."""
        bars = {place for row in self.rows for place, cell in enumerate(row) if isinstance(cell, Bar)}
        return tuple(
            "bars" if place in bars else "words" if place in self.words else "figures"
            for place in range(len(self.columns))
        )

    @property
    def without_bars(self) -> Table:
        """The table without its bars."""
        kept = [place for place, kind in enumerate(self.kinds) if kind != "bars"]
        return replace(
            self,
            columns=tuple(self.columns[place] for place in kept),
            rows=tuple(tuple(row[place] for place in kept) for row in self.rows),
            words=tuple(number for number, place in enumerate(kept) if place in self.words),
        )


@dataclass(frozen=True)
class Facts:
    """Values by name; names in ``unavailable`` are choices that cannot be used here."""

    pairs: tuple[tuple[str, str], ...]
    unavailable: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Diff:
    """A unified difference of a file."""

    text: str

    @property
    def lines(self) -> tuple[str, ...]:
        """Its lines for display, after a line that names the line ends if they are those of Windows."""
        lines = self.text.removesuffix("\n").split("\n") if self.text else []
        windows = ["line ends: CRLF"] if any(line.endswith("\r") for line in lines) else []
        return tuple(printable(line.removesuffix("\r")) for line in (*windows, *lines))


@dataclass(frozen=True)
class Snippet:
    """A command or a path to copy, after the words that introduce it."""

    lead: str
    text: str


@dataclass(frozen=True)
class CandidateRow:
    """A candidate in the list of candidates.

    Attributes:
        outcome: such as ``fits`` or a status.
        cells: its figures, as text.
        reason: why it was not tried, how it ended, or which change makes it fit; empty without one.
    """

    number: str
    name: str
    outcome: str
    cells: tuple[str, ...]
    reason: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Candidates:
    """The candidates one by one.

    Attributes:
        counts: numbers by outcome, in sentences.
        lines: sentences on all of them, such as the reasons of vetoes.
        number: title of the column of numbers, such as ``probe``.
        columns: titles of the columns of figures.
        last: title of the last column, which has the candidate and the reason.
        in_text: whether a terminal and Markdown show the rows; a search shows its rows while it runs.
    """

    counts: str
    lines: tuple[str, ...]
    number: str
    columns: tuple[str, ...]
    last: str
    rows: tuple[CandidateRow, ...]
    in_text: bool

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The outcomes of the rows, in the order of the alphabet."""
        return tuple(sorted({row.outcome for row in self.rows}))


@dataclass(frozen=True)
class Point:
    """A candidate whose memory and speed are known.

    Attributes:
        label: source of the figures, such as ``probe 3``.
        role: ``recommended``, ``default`` or ``other``.
    """

    name: str
    label: str
    peak_bytes: int
    tokens_per_second: float
    role: str


@dataclass(frozen=True)
class Plane:
    """Memory against speed of the candidates: a picture in a terminal, in Markdown a table of the best.

    Attributes:
        legend: each role with its name.
        memory: title of the memory axis.
    """

    points: tuple[Point, ...]
    budget_bytes: int
    legend: tuple[tuple[str, str], ...]
    memory: str

    @property
    def front(self) -> list[Point]:
        """The Pareto front, the least memory first."""
        found = list[Point]()
        for point in sorted(self.points, key=lambda point: (point.peak_bytes, -point.tokens_per_second)):
            if not found or point.tokens_per_second > found[-1].tokens_per_second:
                found.append(point)
        return found


@dataclass(frozen=True)
class Step:
    """The memory of a candidate through one step.

    Attributes:
        role: ``recommended`` or ``default``.
        name: of the candidate, in a few words.
        measured: measurements of probes, in a sentence; empty without any.
    """

    role: str
    name: str
    timeline: MemoryTimeline
    measured: str = ""


@dataclass(frozen=True)
class Charts:
    """The figures of the charts that only a page draws; an empty attribute has no chart.

    Attributes:
        steps: memory through one step of the compared candidates.
    """

    plane: Plane
    steps: tuple[Step, ...] = ()


Block = Paragraph | Listing | Table | Facts | Diff | Snippet | Candidates | Plane | Charts
_Kind = TypeVar("_Kind", bound=Block)


@dataclass(frozen=True)
class Section:
    """Blocks under a title.

    Attributes:
        heading: whether a terminal shows the title, for blocks that are not clear without it.
    """

    title: str
    blocks: tuple[Block, ...]
    medium: Medium = Medium.EVERYWHERE
    heading: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result, first in every form.

    Attributes:
        choices: the chosen candidate's differences from the baseline; empty without any.
        evidence: lines below the headline, in a terminal.
        remarks: sentences below the headline.
        command: command that trains as recommended, for pages; empty without one.
    """

    headline: str
    tone: Tone
    choices: str = ""
    evidence: tuple[str, ...] = ()
    remarks: tuple[Paragraph, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        subject: what was planned or compared, in a sentence; empty if the headline has it.
        title: title of the page.
    """

    verdict: Verdict | None
    sections: tuple[Section, ...]
    subject: str = ""
    title: str = ""

    def blocks(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the blocks of a class, in their order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, kind)]


def memory_axis(sizes: Iterable[int], budget_bytes: int) -> int:
    """Return the end of a memory axis in bytes: the budget, unless a size exceeds it or all are far below it."""
    most = max(sizes)
    return max(most, budget_bytes) if most > budget_bytes * _CROWDED else most


def listing(title: str, lines: Iterable[Line], tone: Tone = Tone.PLAIN) -> list[Section]:
    """Return a section of lines under a title, or none without lines."""
    listed = tuple(lines)
    return [Section(title, (Listing(listed, tone=tone),), heading=True)] if listed else []
