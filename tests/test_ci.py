"""Continuous integration runs the developer's commands, and bug reports contain the needed facts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import LONGEST, TESTS

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / ".ci").iterdir())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"


def read(file: Path) -> Any:
    """Return the content of a YAML file."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_a_script_says_what_it_is_for_and_stops_at_the_first_failure(script: Path) -> None:
    first, reason, *rest = script.read_text(encoding="utf-8").splitlines()
    assert first == "#!/usr/bin/env bash"
    assert reason.startswith("# ")
    assert next(line for line in rest if not line.startswith("#")) == "set -euo pipefail"
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_runs_nothing_but_a_script_that_a_developer_can_run(workflow: Path) -> None:
    steps = [step for job in read(workflow)["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    assert {ROOT / command.split()[0] for command in commands} <= set(SCRIPTS)


@pytest.mark.parametrize("name", LONGEST)
def test_the_files_that_workers_take_first_are_there(name: str) -> None:
    assert (TESTS / name).is_file()


def test_every_part_of_the_night_has_a_machine_of_its_own_and_can_be_run_by_hand() -> None:
    script = (ROOT / ".ci" / "nightly").read_text(encoding="utf-8")
    found = re.search(r"targets=\(([a-z -]+)\)", script)
    assert found is not None
    targets = found[1].split()
    (job,) = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["target"] == targets
    assert set(targets) <= set(phony())


def test_every_target_is_explained() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    # `clean` needs no explanation, and scripts run `can-…`.
    asked = [target for target in phony() if target != "clean" and not target.startswith("can-")]
    assert [target for target in asked if f"| `make {target}" not in page] == []


def test_the_newest_versions_are_looked_for_each_time_as_is_what_is_asked_for_with_them() -> None:
    asked = ["make", "--dry-run", "--no-print-directory", "test-newest", "WITH=trl[vllm]"]
    lines = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    *_, upgrade, tests = lines
    assert "--upgrade --upgrade-strategy eager" in upgrade
    assert upgrade.endswith("'trl[vllm]'")
    assert "-m pytest" in tests


def phony() -> list[str]:
    """Return the Makefile's targets that are no files."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    return next(line.split()[1:] for line in makefile.splitlines() if line.startswith(".PHONY:"))


def test_a_hook_before_a_commit_names_no_version_of_a_tool() -> None:
    assert [repository["repo"] for repository in read(ROOT / ".pre-commit-config.yaml")["repos"]] == ["local"]


@pytest.mark.parametrize("form", ["crash.yml", "wrong-promise.yml"])
def test_who_reports_a_fault_is_asked_for_the_command_the_versions_and_the_result(form: str) -> None:
    questions = {question["id"]: question for question in read(FORMS / form)["body"]}
    assert "result.json" in questions["result"]["attributes"]["description"]
    for asked in ("command", "versions"):
        assert questions[asked]["validations"]["required"] is True
