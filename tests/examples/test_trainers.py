"""Each trainer has an example whose README commands run, and train with the recommendation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import run
from small_workload import TRAINERS

from autotune.cli.parser import read_arguments
from autotune.trainers import trainers

EXAMPLES = Path(run.__file__).parent


def test_every_trainer_has_an_example() -> None:
    assert set(TRAINERS) == set(trainers())
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in TRAINERS if f"({name}/README.md)" not in listed] == []


@pytest.mark.parametrize("name", TRAINERS)
def test_an_example_makes_its_rows_then_searches_then_trains_two_steps(name: str) -> None:
    made, searched, trained = run.commands(EXAMPLES / name / "README.md")
    asked = vars(read_arguments(searched[1:]).arguments)
    assert made[:2] == ["python", "examples/small_workload.py"]
    assert asked.get("trainer") == (None if name == "sft" else name)
    assert [made[2], asked["model"], asked["output"]] == [
        f"examples/build/{name}{part}" for part in ("", "/model", "/found")
    ]
    assert trained[-2:] == ["--max_steps", "2"]


def test_commands_are_those_of_console_blocks_with_continued_lines(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("```console\n$ a 'b c' \\\n    d  # why\nprinted\n```\n\n```python\n$ no\n```\n")
    assert run.commands(page) == [["a", "b c", "d"]]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_the_commands_of_an_example_run(name: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("build", "__pycache__"))

    run.run(name, tmp_path)

    found = tmp_path / "examples" / "build" / name / "found"
    result = json.loads((found / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["confirmed"]) == ("found", True)
    assert (found / "config.yaml").is_file() is (name != "online_dpo")
