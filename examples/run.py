"""Runs the commands of examples' READMEs: ``python examples/run.py sft dpo``, or those of all trainers.

Everything is written into ``examples/build/NAME``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from small_workload import TRAINERS

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command in a page's console blocks: the text after ``$``, with continued lines."""
    text = "".join(_BLOCK.findall(page.read_text(encoding="utf-8"))).replace("\\\n", "")
    return [shlex.split(line[2:], comments=True) for line in text.splitlines() if line.startswith("$ ")]


def run(name: str, directory: Path = ROOT) -> None:
    """Run an example's commands in a directory that has ``examples/``, with this Python's programs.

    Raises:
        subprocess.CalledProcessError: one of them failed; the later ones were not run.
    """
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for words in commands(directory / "examples" / name / "README.md"):
        print("$", shlex.join(words), flush=True)
        subprocess.run([programs / words[0], *words[1:]], cwd=directory, env=environment, check=True)


def main() -> None:
    """Run the examples that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*TRAINERS, []], metavar="NAME", help=", ".join(TRAINERS))
    for name in parser.parse_args().names or TRAINERS:
        run(name)


if __name__ == "__main__":
    main()
