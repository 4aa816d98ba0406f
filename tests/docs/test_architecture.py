"""The pages for maintainers name existing files, names and layers, and all methods of the trainer contract."""

from __future__ import annotations

import re
import tomllib

import pytest

from autotune.techniques import catalogue
from autotune.techniques.base import Technique
from tests.docs.pages import ROOT, python_of
from tests.docs.technique_table import missing_fields

BASES = (ROOT, ROOT / "autotune")
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = DOCUMENT + (ROOT / "docs" / "wrong-estimates.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PAGES)))
# Written by a run, into its output directory.
WRITTEN = {"probes/0/"}
PATHS = [name for name in QUOTED if re.fullmatch(r"[\w.-]*/[\w./-]*|[\w-]+\.(py|toml)", name) and name not in WRITTEN]
NAMED_IN = re.findall(r"`(\w+)`(?:, `(\w+)`)? (?:in|of) `([\w/]+\.py)`", PAGES)


def layers(container: str) -> set[str]:
    """Return the layers of a package that import-linter enforces."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rows,) = (contract["layers"] for contract in contracts if contract.get("containers") == [container])
    return {name.strip() for row in rows for name in row.split("|")}


def section(title: str) -> str:
    """Return the text below a heading."""
    return DOCUMENT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_path_exists() -> None:
    assert PATHS
    assert [path for path in PATHS if not any((base / path).exists() for base in BASES)] == []


def test_every_name_that_a_file_has_is_in_it() -> None:
    assert NAMED_IN
    for name, other, file in NAMED_IN:
        (text,) = [(base / file).read_text(encoding="utf-8") for base in BASES if (base / file).exists()]
        assert {name, other} - {""} <= set(re.findall(r"\w+", text)), file


def test_the_example_of_a_technique_is_one() -> None:
    """It writes a field of TRL that no technique writes yet: else choose another example."""
    (example,) = python_of(ROOT / "docs" / "architecture.md")
    names: dict[str, object] = {}
    exec(example, names)
    (technique,) = [each() for each in names.values() if isinstance(each, type) and hasattr(each, "writes")]
    assert isinstance(technique, Technique)
    assert missing_fields(technique, "grpo") == []
    assert all(technique.writes.isdisjoint(other.writes) for other in catalogue())


@pytest.mark.parametrize(
    ("title", "container"),
    [("Layers", "autotune"), ("Layers of the virtual accelerator", "autotune.virtual")],
)
def test_every_layer_is_named(title: str, container: str) -> None:
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in section(title).splitlines() if line.startswith("|")]
    assert {name for row in rows for name in row} == layers(container)


@pytest.mark.parametrize("file", ["autotune/trainers/micro_batches.py", "autotune/step/trainers/base.py"])
def test_every_abstract_method_of_a_trainer_is_in_the_contract(file: str) -> None:
    abstract = re.findall(r"@abstractmethod\n    def (\w+)", (ROOT / file).read_text(encoding="utf-8"))
    assert abstract
    assert set(abstract) - set(re.findall(r"`(\w+)`", section("The trainer contract"))) == set()
