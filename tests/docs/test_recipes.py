"""The recipes for clusters: their syntax, and that the command line takes the commands that they give."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli.parser import read_arguments

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "searching_together"
SBATCH, JOB = RECIPES / "job-array.sbatch", RECIPES / "indexed-job.yaml"
GIVEN = {"MODEL": "a model", "DATA": "rows of mine.jsonl", "SLURM_ARRAY_TASK_ID": "3"}


def given(command: list[str]) -> dict[str, Any]:
    """Return the options of a command that the command line has read."""
    return vars(read_arguments(command[1:]).arguments)


def test_every_recipe_is_looked_at_here_and_shown_in_the_guide() -> None:
    assert set(RECIPES.iterdir()) == {SBATCH, JOB}
    guide = (RECIPES.parents[1] / "docs" / "searching-together.md").read_text(encoding="utf-8")
    for recipe in (SBATCH, JOB):
        assert f"(../examples/searching_together/{recipe.name})" in guide


def test_the_slurm_script_is_bash_and_its_directives_stand_before_the_first_command() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    lines = SBATCH.read_text(encoding="utf-8").splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(directives) < min(commands)
    assert all(lines[number].startswith("#SBATCH --") for number in directives)


def test_the_slurm_script_gives_a_command_that_is_read(tmp_path: Path) -> None:
    stand_in = tmp_path / "autotune"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%q " autotune "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    environment = {**os.environ, **GIVEN, "SHARED": str(tmp_path / "run-1"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SBATCH), "--allow", "lora"], env=environment, check=True, capture_output=True, text=True
    )
    options = given(shlex.split(done.stdout))
    assert (options["model"], options["dataset"], options["study"]) == ("a model", "rows of mine.jsonl", "run-1")
    assert options["storage"] == f"journal://{tmp_path}/run-1/study.log"
    assert options["output"].endswith("worker-3")
    assert options["resume"]
    assert options["memory_budget"]


@pytest.mark.parametrize("name", ["MODEL", "DATA", "SHARED", "SLURM_ARRAY_TASK_ID"])
def test_the_slurm_script_says_what_it_was_not_given(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, **GIVEN, "SHARED": str(tmp_path)}
    del environment[name]
    done = subprocess.run(["bash", str(SBATCH)], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert name in done.stderr


def test_the_kubernetes_job_is_indexed_and_gives_a_command_that_is_read() -> None:
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    # The number of failures per index is counted only where a failed pod is not restarted in its place.
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    options = given([*container["command"], *container["args"]])
    assert options["resume"]
    assert options["memory_budget"]
    assert "$(JOB_COMPLETION_INDEX)" in options["output"]
    assert {item["name"] for item in container["env"]} == {"JOB_COMPLETION_INDEX", "PGPASSWORD"}


def test_what_the_kubernetes_job_mounts_are_volumes_that_it_has() -> None:
    pod = yaml.safe_load(JOB.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    mounted = [mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in pod["volumes"])
