"""Every benchmark runs as a module from the root of the repository, without a changed path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


RUN = [
    module_of(file)
    for file in FILES
    if file.name == "__main__.py" or "if __name__ ==" in file.read_text(encoding="utf-8")
]


@pytest.mark.nightly
@pytest.mark.parametrize("module", RUN)
def test_a_benchmark_says_what_it_takes(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_every_benchmark_is_in_the_list() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    # The child side of another benchmark is started by it alone.
    commands = [module for module in RUN if module != "benchmarks.probe.whole_steps"]
    absent = [module for module in commands if f"python -m {module}" not in listed and module != "benchmarks.gpu.suite"]
    assert not absent


def test_no_benchmark_changes_the_path_of_python() -> None:
    changing = [file for file in FILES if "sys.path" in file.read_text(encoding="utf-8")]
    assert not changing
