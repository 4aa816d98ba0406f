"""Resolves users' paths, and distinguishes paths from ids of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from autotune.core.files.text import decodable, printable
from autotune.errors import InputError

# The hub's own rule: huggingface_hub.utils._validators.REPO_ID_REGEX and validate_repo_id.
_HUB_ID = re.compile(r"(\b[\w\-.]+\b/)?\b[\w\-.]{1,96}\b")
_PATH_STARTS = (".", "/", "~")


def user_path(text: str | Path) -> Path:
    """Return a user's path with ``~`` expanded.

    Raises:
        InputError: it is empty or ``-``, has a NUL character, or has the ``~NAME`` of an unknown user.
    """
    if "\0" in str(text):
        raise InputError(f"{str(text)!r} has a NUL character, which no path can have.", hint="Give another name.")
    if text == "":
        raise InputError("The name of a file or directory is empty.", hint="Give a name.")
    if text == "-":
        raise InputError(
            "'-' is not the name of a file or directory.",
            hint="Give a name: files are not read from stdin or written to stdout.",
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"The home directory in {str(text)!r} is not known.", hint="Write the full path.") from error


def exists(path: str | Path) -> bool:
    """Return whether a path exists; False if that cannot be found out, as for a name that is too long."""
    return os.path.exists(path)  # noqa: PTH110 (Path.exists raises there)


def is_file(path: str | Path) -> bool:
    """Return whether a file exists; False if that cannot be found out, as for a name that is too long."""
    return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises there)


def unreadable(kind: str, text: str, error: OSError) -> InputError:
    """Return the error for a model or dataset that cannot be accessed."""
    # Only os.getcwd raises an OSError without a filename here.
    why = error.strerror if error.filename else "the working directory was removed"
    return InputError(f"The {kind} {text!r} cannot be accessed: {why}.")


def local_path(text: str, kind: str, suffixes: frozenset[str]) -> Path | None:
    """Return the absolute path that ``text`` names, or None if it is a hub id.

    An existing path wins over a hub id, as in transformers and datasets. A text looks like a path if it starts with
    ``.``, ``/`` or ``~``, has several slashes, or ends with one of ``suffixes``.

    Args:
        text: the user's input.
        kind: ``model`` or ``dataset``, for messages.
        suffixes: suffixes of files, in lower case and with their dot.

    Raises:
        InputError: it looks like a path that does not exist, or is neither a path nor a hub id.
    """
    if not text.strip():
        raise InputError(f"The {kind} is an empty text.", hint="Give a path or a hub id.")
    try:
        path = Path(text).expanduser().absolute()
        if _exists_or_raise(path):
            # A link to a file keeps its name: targets in hub caches and of DVC have names without a suffix.
            resolved = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
            if not decodable(resolved):
                raise InputError(
                    f"The {kind} {printable(str(resolved))} has a name that is not UTF-8.",
                    hint="Rename it; datasets cannot load it.",
                )
            return resolved
        if text.startswith(_PATH_STARTS) or text.count("/") > 1 or Path(text).suffix.lower() in suffixes:
            raise InputError(f"The {kind} {text!r} does not exist.", hint=_existing_part_text(path))
    except OSError as error:
        raise unreadable(kind, text, error) from error
    except RuntimeError as error:  # from expanduser: ~NAME of an unknown user
        raise InputError(
            f"The home directory in the {kind} {text!r} is not known.", hint="Write the full path."
        ) from error
    if not _HUB_ID.fullmatch(text) or "--" in text or ".." in text or text.endswith(".git"):
        raise InputError(f"The {kind} {text!r} is neither a path nor a hub id.", hint="A hub id is NAME or ORG/NAME.")
    return None


def _exists_or_raise(path: Path) -> bool:
    """Return whether a path exists.

    Raises:
        OSError: that cannot be found out, as in an unreadable directory; ``Path.exists`` of Python 3.14 returns False.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL is in the name
        return False
    return True


def _existing_part_text(path: Path) -> str:
    parent = next(parent for parent in path.parents if parent.exists())
    if parent == path.parent:
        return f"{parent} exists, but has no {path.name!r}."
    return f"The path exists up to {parent}."
