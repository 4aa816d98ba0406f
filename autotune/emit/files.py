"""Writes the files of a bundle atomically; errors have a hint for the user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.core.files.atomic import remove_partial_files, unwritten, written_atomically
from autotune.errors import InputError


@contextmanager
def written(file: Path) -> Iterator[Path]:
    """Yield a path to write ``file`` to; afterwards the file is complete, or unchanged after an error.

    Raises:
        InputError: the directory cannot be made or written, or the disk is full.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(file) as part:
            yield part
            remove_partial_files(file)
    except OSError as error:
        raise _cannot_write(file, error) from error


def write_text(file: Path, text: str, *, executable: bool = False) -> None:
    """Write a text file, in UTF-8.

    Args:
        executable: whether to set the executable bits.

    Raises:
        InputError: the directory cannot be made or written, or the disk is full.
    """
    with written(file) as part:
        # A lone surrogate, from a byte of a file name that is not UTF-8, is escaped as JSON writes it.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        if executable:
            part.chmod(part.stat().st_mode | 0o111)


def check_writable(directory: Path, option: str = "--output") -> None:
    """Check that files can be written to a directory, or that a missing directory can be created.

    Raises:
        InputError: they cannot; the hint names ``option``.
    """
    try:
        nearest = next(each for each in (directory, *directory.parents) if each.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _cannot_write(directory, error, option) from error


def check_file(file: Path, option: str) -> None:
    """Check that a file can be written, before the work whose result it is to have.

    Raises:
        InputError: it cannot; the hint names ``option``.
    """
    # A rename would replace a device such as /dev/null. Methods of Path raise for a name that is too long.
    if os.path.exists(file) and not os.path.isfile(file):  # noqa: PTH110, PTH113
        what = "a directory" if os.path.isdir(file) else "not a regular file"  # noqa: PTH112
        raise InputError(f"{file} is {what}.", hint=f"Give the name of a file with {option}.")
    check_writable(file.absolute().parent, option)


def remove(file: Path) -> None:
    """Remove a file if it is there.

    Raises:
        InputError: it is there and cannot be removed.
    """
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(file, error) from error


def _cannot_write(file: Path, error: OSError, option: str = "--output") -> InputError:
    return unwritten(file, error, f"choose another directory with {option}")
