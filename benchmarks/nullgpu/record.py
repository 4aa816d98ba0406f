"""The results of each case, in a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.nullgpu.cases import Case


class Record:
    """The rows of a file, which several processes may add to.

    Args:
        file: read now, if it is there, and written after every change.

    Attributes:
        about: what was installed, by name.
        rows: what is known, by the name of the case.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.about: Mapping[str, str] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self._read()

    def put(self, case: Case, **found: Any) -> None:
        """Add results of a case, and write the file."""
        # Another process may have written since.
        self._read()
        self.rows[case.name] = {"case": case.name, **self.rows.get(case.name, {}), **found}
        self._write()

    def keep(self, names: Iterable[str], about: Mapping[str, str]) -> None:
        """Drop unnamed cases, order the others as named, and record the installed versions."""
        self._read()
        self.about = about
        self.rows = {name: self.rows[name] for name in names if name in self.rows}
        self._write()

    def _read(self) -> None:
        for line in self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else ():
            row = json.loads(line)
            if "case" in row:
                self.rows[row["case"]] = row
            else:
                self.about = row

    def _write(self) -> None:
        beside = self._file.with_suffix(f".{os.getpid()}")
        lines = (json.dumps(row) + "\n" for row in (self.about, *self.rows.values()))
        beside.write_text("".join(lines), encoding="utf-8")
        beside.replace(self._file)
