"""Public tables of measured memory as data: each run, its published figures, and its traced ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Row:
    """One measured run.

    Attributes:
        name: as the table calls it.
        published: bytes by the name of the figure, of ``step`` seconds; None where the run ran out of memory. A figure
            that was not published, or is not comparable, is left out.
        trainable: number of trainable parameters that the table states, which a trace has to have, too.
        settings: what this run did differently from the table's loop.
    """

    name: str
    published: Mapping[str, float | None]
    trainable: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a row.

    Attributes:
        traced: bytes by the name of the figure, of ``step`` seconds.
        trainable: number of trainable parameters of the traced model.
        failure: why there is no trace, or "".
        seconds: wall clock.
    """

    traced: Mapping[str, float] = field(default_factory=dict)
    trainable: int = 0
    failure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Table:
    """A public table.

    Attributes:
        name: what it is called.
        url: where it lies, at a commit.
        source: which of its figures these are, and where the loop is.
        hardware: the GPU.
        capability: its CUDA compute capability.
        memory_bytes: what the GPU has, or None where no row ran out of it.
        software: versions, as published.
        figures: what each figure is, by its name.
        assumed: what a trace assumes of the run.
        unknown: what is not known of the run, or is not traced.
        explained: why some rows are as far off as they are.
        calibrated_on: the row that an assumption was fitted to, which says nothing of a trace's accuracy; or None.
        loop: settings of the loop, for every row.
    """

    name: str
    url: str
    source: str
    hardware: str
    capability: tuple[int, int]
    memory_bytes: int | None
    software: str
    figures: Mapping[str, str]
    assumed: Sequence[str]
    unknown: Sequence[str]
    explained: Sequence[str]
    calibrated_on: str | None
    loop: Mapping[str, Any]
    rows: Sequence[Row]


def load(name: str) -> Table:
    """Return the table of that name in :data:`FOLDER`."""
    data = json.loads(Path(FOLDER, f"{name}.json").read_text())
    data["capability"] = tuple(data["capability"])
    data["rows"] = [
        Row(row.pop("name"), row.pop("published"), row.pop("trainable"), settings=row) for row in data["rows"]
    ]
    return Table(**data)
