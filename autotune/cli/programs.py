"""Commands that are printed for the user to run, so that they work when they are pasted."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def program(name: str) -> str:
    """Return how a program that is installed beside this Python is started: by its name where that finds it."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not beside.exists() or (found is not None and Path(found).samefile(beside)):
        return name
    return str(beside)


def resume_command(argv: Sequence[str]) -> str | None:
    """Return the command that goes on where ``argv`` was interrupted; None where the command has nothing to go on with.

    Args:
        argv: as in ``sys.argv``: how this program was started, and its arguments.
    """
    arguments = list(argv[1:])
    if not arguments or arguments[0] != "probe":
        return None
    if "--resume" not in arguments:
        arguments.append("--resume")
    started = [sys.executable, "-m", "autotune"] if Path(argv[0]).name == "__main__.py" else [program("autotune")]
    return shlex.join([*started, *arguments])
