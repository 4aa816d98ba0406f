"""The output directory of a search: its creation, its lock, its folders, and the budget that a resume needs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.files.atomic import reason_of
from autotune.core.files.json_text import read_json
from autotune.core.files.text import decodable, printable
from autotune.emit.arguments import short_name
from autotune.emit.files import write_text
from autotune.errors import InputError
from autotune.inspection.paths import user_path
from autotune.study.problem import ProbeRun, Purpose

_RUN_FILE = "run.json"
_LOCK_FILE = ".lock"
_PROBES = "probes"
_EARLY_NAMES = frozenset({"workload", _PROBES, _LOCK_FILE})
"""Files that a run may write to its directory before ``run.json``."""


@dataclass(frozen=True)
class Output:
    """The output directory of a run.

    Attributes:
        directory: absolute path.
        is_new: whether this run created it.
    """

    directory: Path
    is_new: bool = field(default=False, compare=False)

    @property
    def workload(self) -> Path:
        """The folder of the tokenised rows and of the jobs that wrote them."""
        return self.directory / "workload"

    @property
    def study_url(self) -> str:
        """URL of the study in the directory."""
        return f"sqlite:///{self.study_file}"

    @property
    def study_file(self) -> Path:
        """The database of that study."""
        return self.directory / "study.db"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other runs while the context is active; the lock of a killed run is released.

        At the end, further copies of the tokenised rows are removed, and a directory that this run created without a
        probe in it.

        Raises:
            InputError: another run writes to it.
        """
        with os.fdopen(_open_lock(self.directory / _LOCK_FILE)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"Another run writes to {self.directory}.",
                    hint="To search together, give each its own --output, and the same --storage and --study.",
                ) from error
            except OSError as error:
                # Some network file systems have no locks.
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            try:
                yield
            except (InputError, KeyboardInterrupt):
                if self.is_new and not any(path.exists() for path in (self.study_file, self.directory / _PROBES)):
                    shutil.rmtree(self.directory, ignore_errors=True)
                raise
            # ``datasets`` made a copy of the rows for each ``max_length``; a resumed run makes its own.
            for copy in self.workload.glob("*/cache-*.arrow"):
                copy.unlink(missing_ok=True)

    def probe(self, run: ProbeRun) -> Path:
        """Return the folder of a run: ``7``, ``7-confirmation``, ``7-comparison-1``, ``7-comparison-1-baseline``, ….

        Raises:
            InputError: the directory was removed, and the tokenised rows with it.
        """
        if not self.directory.is_dir():
            hint = "Run the command again; add --resume if the study is in --storage."
            raise InputError(f"The output directory {self.directory} was removed during the search.", hint=hint)
        name = str(run.number)
        if run.turn is not None:
            suffix = "" if run.turn.number == run.turn.winner else "-baseline"
            name = f"{run.turn.winner}-comparison-{run.turn.pair + 1}{suffix}"
        elif run.purpose is Purpose.CONFIRMATION:
            name += "-confirmation"
        return self.directory / _PROBES / name

    def remembered_budget(self) -> int | None:
        """Return the memory budget of the run to resume, in bytes; None without such a run."""
        try:
            return int(read_json((self.directory / _RUN_FILE).read_text(encoding="utf-8"))["budget_bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember_budget(self, budget_bytes: int) -> None:
        """Save the memory budget for a resume, since a device's free memory varies."""
        write_text(self.directory / _RUN_FILE, json.dumps({"budget_bytes": budget_bytes}) + "\n")


def default_output(model: str, dataset: str, base: str | Path | None = None) -> str:
    """Return the name of a directory: ``autotune-<model>-<dataset>``, or ``autotune-<base>`` without its ending."""
    if base is not None:
        return f"autotune-{_slug(Path(base).stem)}"
    path = Path(model)
    model_name = path.parent.name if path.name == "config.json" else path.name
    return f"autotune-{_slug(model_name)}-{_slug(short_name(dataset))}"


def open_output(directory: str | Path) -> Output:
    """Create the directory if it does not exist, and check that it is writable and belongs to a run.

    Raises:
        InputError: it cannot be created or written to, or has files that are no run's.
    """
    path = user_path(directory).absolute()
    hint = "Choose another --output."
    # SQLAlchemy parses these characters as parts of a URL (2.1, ``engine/url.py``): the study would be elsewhere.
    for mark in "?%":
        if mark in str(path):
            raise InputError(f"The URL of a study cannot have the {mark} of the output directory {path}.", hint=hint)
    if not decodable(path):
        raise InputError(f"The output directory {printable(str(path))} has a name that is not UTF-8.", hint=hint)
    try:
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        # A run that is killed may leave a part of a file.
        names = {entry.name for entry in path.iterdir() if not entry.match(".*.part")}
    except OSError as error:
        raise InputError(f"The output directory {path} cannot be used: {reason_of(error)}.", hint=hint) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"The output directory {path} is not writable.", hint=hint)
    output = Output(path, is_new)
    # A file of that name may be another program's.
    if names - _EARLY_NAMES and output.remembered_budget() is None:
        raise InputError(f"The output directory {path} holds other files and no run of autotune.", hint=hint)
    return output


def _open_lock(lock: Path) -> int:
    """Open a lock file, which may exist; a symbolic link is refused, since its target may be another user's file."""
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        hint = "Choose another --output, or remove the file if no run is active."
        raise InputError(f"The lock file {lock} cannot be opened: {why}.", hint=hint) from error


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.") or "run"
