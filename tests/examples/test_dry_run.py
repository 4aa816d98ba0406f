"""The recipe of a dry run is a command that autotune takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from autotune.cli.parser import read_arguments

RECIPES = Path(__file__).parents[2] / "examples" / "dry_run"


def test_the_workflow_runs_the_script_dry() -> None:
    workflow = yaml.safe_load((RECIPES / "workflow.yml").read_text(encoding="utf-8"))
    words = shlex.split(workflow["jobs"]["dry-run"]["steps"][-1]["run"])
    assert words[:2] == ["autotune", "dry-run"]
    found = vars(read_arguments(words[1:]).arguments)
    assert found == {"gpu": "H100-80GB", "timeout": "20m", "command": ["python", "train.py"]}
