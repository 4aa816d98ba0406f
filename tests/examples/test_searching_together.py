"""The recipes for many workers are valid scripts, and their autotune commands parse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli.parser import read_arguments
from autotune.study.backends import GRPC, JOURNAL

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ARRAY, INDEXED = EXAMPLES / "slurm" / "job-array.sbatch", EXAMPLES / "kubernetes" / "indexed-job.yaml"


def asked_of(*words: str) -> dict[str, Any]:
    return vars(read_arguments(words).arguments)


def test_the_job_array_is_a_script_whose_tasks_join_one_study(tmp_path: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(ARRAY)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    stand_in = tmp_path / "autotune"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    shared = tmp_path / "shared run"
    tasks = []
    for task in ("0", "1"):
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "MODEL": "a model",
            "DATA": "data.jsonl",
            "SHARED": str(shared),
            "SLURM_ARRAY_TASK_ID": task,
        }
        command = ["bash", str(ARRAY), "--allow", "lora"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        tasks.append(asked_of(*done.stdout.splitlines()))
    first, second = tasks
    assert first.pop("output") == f"{shared}/worker-0"
    assert second.pop("output") == f"{shared}/worker-1"
    assert first == second
    assert first["storage"] == f"{JOURNAL}{shared}/study.log"
    assert first["study"] == "shared run"
    assert first["resume"]
    assert first["memory_budget"]
    assert first["allow"] == ["lora"]
    assert shared.is_dir()


def test_the_indexed_job_starts_workers_of_one_study_in_a_database() -> None:
    job = yaml.safe_load(INDEXED.read_text(encoding="utf-8"))
    assert (job["kind"], job["spec"]["completionMode"]) == ("Job", "Indexed")
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    program, *words = list(map(str, worker["command"] + worker["args"]))
    assert program == "autotune"
    asked = asked_of(*words)
    assert asked["storage"].startswith("postgresql+psycopg://")
    assert ":" not in asked["storage"].removeprefix("postgresql+psycopg://")
    assert asked["study"]
    assert asked["resume"]
    assert asked["memory_budget"]
    index = "JOB_COMPLETION_INDEX"
    assert asked["output"].endswith(f"$({index})")
    given = {variable["name"] for variable in worker["env"]}
    assert {index, "PGPASSWORD"} <= given
    mounted = {volume["mountPath"] for volume in worker["volumeMounts"]}
    assert {str(Path(asked["dataset"]).parent), str(Path(asked["output"]).parent)} <= mounted
    claimed = {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
    assert {volume["name"] for volume in worker["volumeMounts"]} == claimed


def ran(words: list[str], bundle: Path, **environment: str) -> dict[str, Any]:
    """Run a recipe's command with this Python's autotune, and return the result in its bundle."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((bundle / "result.json").read_text(encoding="utf-8"))
    return result


@pytest.mark.nightly
@pytest.mark.slow
def test_tasks_of_the_job_array_and_pods_of_the_indexed_job_join_one_search_and_recommend_the_same(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    shared, bundle, few = tmp_path / "shared", tmp_path / "pod", ["--trials", "2", "--effort", "quick"]
    given = {
        "MODEL": str(small_model_directory),
        "DATA": str(small_dataset_file),
        "SHARED": str(shared),
        "BUDGET": "2GiB",
    }
    first = ran(["bash", str(ARRAY), *few], shared / "worker-0", SLURM_ARRAY_TASK_ID="0", **given)
    # The pod's own words, with the study of the job array: the last of an option that is given twice counts.
    (worker,) = yaml.safe_load(INDEXED.read_text(encoding="utf-8"))["spec"]["template"]["spec"]["containers"]
    words = [str(small_model_directory), str(small_dataset_file), *map(str, worker["args"][2:]), *few]
    words += ["--storage", f"{JOURNAL}{shared}/study.log", "--study", "shared", "--memory-budget", "2GiB"]
    second = ran([*worker["command"], *words, "--output", str(bundle)], bundle)
    assert (first["status"], second["status"]) == ("found", "found")
    assert first["recommended"]["candidate"] == second["recommended"]["candidate"]


def test_the_page_names_the_recipes_and_every_kind_of_storage() -> None:
    page = (ROOT / "docs" / "searching-together.md").read_text(encoding="utf-8")
    for recipe in (ARRAY, INDEXED):
        assert f"../{recipe.relative_to(ROOT)}" in page
    for kind in ("sqlite://", JOURNAL, "postgresql+psycopg://", GRPC):
        assert f"`{kind}" in page
