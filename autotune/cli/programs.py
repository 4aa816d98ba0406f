"""Returns shell commands that the user can paste: of an installed program, and of a resumed search."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def program(name: str) -> str:
    """Return the command that starts a program installed with this Python: its name if that is on the path."""
    installed = Path(sys.executable).with_name(name)
    on_path = shutil.which(name)
    if not installed.exists() or (on_path is not None and Path(on_path).samefile(installed)):
        return name
    return str(installed)


def resume_command(argv: Sequence[str]) -> str | None:
    """Return the command that resumes an interrupted ``argv``, or None if the command cannot be resumed.

    Args:
        argv: as in ``sys.argv``: the program and its arguments.
    """
    arguments = list(argv[1:])
    if not arguments or arguments[0] != "probe":
        return None
    if "--resume" not in arguments:
        # After --, it would be a name.
        arguments.insert(arguments.index("--") if "--" in arguments else len(arguments), "--resume")
    started = [sys.executable, "-m", "autotune"] if Path(argv[0]).name == "__main__.py" else [program("autotune")]
    return shlex.join([*started, *arguments])
