"""What ``docs/architecture.md`` names exists: files, modules, layers, and what a trainer has to say."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", DOCUMENT)))
FOLDERS = ("autotune/", "benchmarks/", "docs/", "examples/", "search_spaces/", "tests/")
# Written by a run, into its output directory.
WRITTEN = {"config.yaml", "log.txt", "reply.json", "result.json", "request.json", "train.py"}
PATHS = [
    name
    for name in QUOTED
    if name.startswith(FOLDERS) or (re.fullmatch(r"[\w./-]+\.(py|md|toml|yaml)", name) and name not in WRITTEN)
]
MODULES = [name for name in QUOTED if re.fullmatch(r"(autotune|benchmarks|tests)(\.\w+)+", name)]


def layers() -> set[str]:
    """Return the layers that import-linter enforces."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rows,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {name.strip() for row in rows for name in row.split("|")}


def section(title: str) -> str:
    """Return the text below a heading."""
    return DOCUMENT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_module_exists() -> None:
    assert [name for name in MODULES if importlib.util.find_spec(name) is None] == []


def test_every_layer_is_named() -> None:
    rows = [
        re.findall(r"`(\w+)`", line.split("|")[1]) for line in section("Layers").splitlines() if line.startswith("|")
    ]
    assert {name for row in rows for name in row} == layers()


@pytest.mark.parametrize("file", ["autotune/trainers/micro_batches.py", "autotune/step/trainers/base.py"])
def test_every_abstract_method_of_a_trainer_is_in_the_contract(file: str) -> None:
    abstract = re.findall(r"@abstractmethod\n    def (\w+)", (ROOT / file).read_text(encoding="utf-8"))
    assert abstract
    assert set(abstract) - set(re.findall(r"`(\w+)`", section("The trainer contract"))) == set()
