"""Finds the Python interpreter of a command, possibly in another environment, and its null GPU library."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from autotune.errors import AutotuneError, InputError
from autotune.inspection.command_line import ASSIGNMENT, PYTHON
from autotune.nullgpu.build import build_library

# Options of `env` whose value is the next word.
_ENV_OPTIONS_WITH_VALUE = ("-u", "--unset", "-C", "--chdir")
# autotune's folder may be a site-packages with other packages, so the interpreter's own packages come before it.
_BUILD_SCRIPT = """
import json, sys
sys.path.append(sys.argv[1])
from autotune.errors import AutotuneError
try:
    from autotune.nullgpu.build import build_library
    print(json.dumps({"folder": str(build_library())}))
except AutotuneError as error:
    print(json.dumps({"message": error.message, "hint": error.hint}))
"""


def interpreter(command: Sequence[str], variables: Mapping[str, str]) -> Path:
    """Return the Python that a command runs: itself, that of a launcher such as ``accelerate``, or ``python``.

    Raises:
        InputError: its program cannot be found.
    """
    words = _without_variables(command)
    if not words:
        raise InputError("There is no command to run.", hint="Write it after --, as in -- python train.py.")
    path = variables.get("PATH")
    found = shutil.which(words[0], path=path)
    if found is None:
        raise InputError(f"The program {words[0]} cannot be found.", hint="Give its path, or put it on PATH.")
    if PYTHON.fullmatch(PurePath(found).name):
        return Path(found)
    named = _shebang(Path(found))
    if named is not None:
        return named
    fallback = shutil.which("python", path=path) or sys.executable
    return Path(fallback)


def _without_variables(command: Sequence[str]) -> Sequence[str]:
    """Return a command without leading ``NAME=value`` assignments and ``env`` with its options."""
    words = list(command)
    while words and (words[0] == "env" or ASSIGNMENT.fullmatch(words[0])):
        is_env = words.pop(0) == "env"
        while is_env and words and words[0].startswith("-"):
            del words[: 2 if words[0] in _ENV_OPTIONS_WITH_VALUE else 1]
    return words


def library_folder(python: Path, variables: Mapping[str, str]) -> Path:
    """Return the folder of the null GPU library for an interpreter's environment; builds the library if need be.

    Raises:
        InputError: that environment lacks a requirement of null GPUs.
        AutotuneError: the library could not be built.
    """
    # Two interpreters in one bin folder share a virtual environment, so autotune's own process can build the library.
    if python.parent.absolute() == Path(sys.executable).parent.absolute():
        return build_library()
    root = Path(__file__).parents[2]
    clean = {name: value for name, value in variables.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
    builder = [str(python), "-c", _BUILD_SCRIPT, str(root)]
    done = subprocess.run(builder, env=clean, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError(f"{python} cannot prepare null GPUs: {last}") from error
    if "folder" in answer:
        return Path(answer["folder"])
    raise AutotuneError(f"{answer['message']} That is the environment of {python}.", hint=answer["hint"])


def _shebang(program: Path) -> Path | None:
    """Return the Python that a script names in its first lines, as pip and setuptools write them; None if none."""
    try:
        with program.open("rb") as file:
            first, second = file.readline(4096), file.readline(4096)
    except PermissionError:
        # A program can be executable without being readable.
        return None
    if not first.startswith(b"#!"):
        return None
    line = first[2:].decode(errors="replace").strip()
    if PurePath(line.split(" ")[0]).name == "sh" and second.startswith(b"'''exec'"):
        # pip writes interpreter paths with spaces, or longer than the kernel's limit, into the second line.
        line = second.decode(errors="replace").removeprefix("'''exec'")
    words = shlex.split(line)
    if words and PurePath(words[0]).name == "env":
        named = shutil.which(words[-1])
        words = [named] if named else []
    if words and PYTHON.fullmatch(PurePath(words[0]).name) and os.access(words[0], os.X_OK):
        return Path(words[0])
    return None
