"""Rules for every file of the package, and the cost of importing it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "autotune").rglob("*.py"))
LINES_AT_MOST = 400
# Homes (that of the made-up user "me" apart), mounted work folders and local package folders: they are on one machine.
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|home/(?!me/)\w+|Users/\w+|work|opt/\w+|tmp/\w)/")

PARENT_MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
    if not {"step", "virtual"} & set(file.relative_to(ROOT).parts) and file.name != "__main__.py"
]


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after running ``code``."""
    report = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(run.stdout.split())


def test_a_file_says_its_reason_in_its_first_line_and_is_short() -> None:
    for file in FILES:
        source = file.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(source))
        assert docstring, file
        assert docstring.splitlines()[0].endswith((".", "?")), file
        assert source.startswith('"""'), file
        assert source.count("\n") <= LINES_AT_MOST, file


def test_files_of_tests_benchmarks_and_examples_are_short_too() -> None:
    files = [file for name in ("tests", "benchmarks", "examples") for file in (ROOT / name).rglob("*.py")]
    assert [file for file in files if file.read_text(encoding="utf-8").count("\n") > LINES_AT_MOST] == []


def test_nothing_but_its_two_files_knows_a_trainer_s_words() -> None:
    words = re.compile(r"\bsft|SFT|input_ids|labels")
    homes = {ROOT / "autotune" / "trainers", ROOT / "autotune" / "step" / "trainers"}
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in FILES
        if not homes & set(file.parents)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


def test_importing_autotune_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "trl", "datasets", "optuna", "rich", "numpy", "yaml"}
    assert heavy & loaded_by("import autotune") == set()


def test_no_part_of_the_parent_loads_a_training_library_when_imported() -> None:
    heavy = {"torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed"}
    # What transformers' trainers and PyTorch import themselves: a callback, and what a null GPU loads into a training.
    others = ("autotune.api.preflight", "autotune.nullgpu.hook.")
    light = [name for name in PARENT_MODULES if not name.startswith(others)]
    assert heavy & loaded_by("\n".join(f"import {name}" for name in light)) == set()


def test_no_file_names_a_place_on_one_machine() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("needs a git checkout: the files of the project are those that git lists")
    found = []
    for name in listing.stdout.splitlines():
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace") if (ROOT / name).is_file() else ""
        found += [f"{name}:{number}" for number, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)]
    assert found == []


def test_tests_run_with_pinned_versions_of_everything_that_is_required() -> None:
    from packaging.requirements import Requirement

    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {pin.name.lower().replace("_", "-"): next(iter(pin.specifier)).version for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = map(
        Requirement,
        [
            *project["dependencies"],
            *(line for name in ("dev", "docs") for line in project["optional-dependencies"][name]),
        ],
    )
    for requirement in required:
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(pinned[name]), requirement
        assert "+" not in pinned[name]
