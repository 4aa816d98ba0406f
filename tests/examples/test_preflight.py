"""The pre-flight recipes start the job of a configuration that fits, and stop one that does not fit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from autotune.cli.parser import read_arguments
from tests.small import long_tailed_texts, text_rows, write_rows, write_small_model

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "preflight"
FITS, TIGHT = "4GiB", "1MiB"
LIMITS = [(TIGHT, 1), (FITS, 0)]
CONFIGURATION = "configs/sft/small.yaml"
STARTED = "the job started"


@dataclass(frozen=True)
class Project:
    """A folder with a configuration, and the environment of its commands."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, *words: str | Path, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, words)],
            cwd=self.folder,
            env={**self.environment, **more},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    model = write_small_model(folder / "model", "llama")
    rows = write_rows(folder / "rows.jsonl", text_rows(long_tailed_texts(16)))
    configs = folder / "configs" / "sft"
    configs.mkdir(parents=True)
    document = {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": str(rows)}],
        "output_dir": "out",
        "max_length": 32,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
    }
    (configs / "small.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    (folder / "broken.yaml").write_text(yaml.safe_dump({**document, "packng": True}), encoding="utf-8")
    programs = folder / "bin"
    programs.mkdir()
    # `trl` is a stand-in that only says that it was started: that TRL trains by a configuration is tested elsewhere.
    for name, line in {
        "autotune": f'exec {shlex.quote(sys.executable)} -m autotune "$@"',
        "trl": f"echo {STARTED}",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return Project(folder, environment)


SCRIPTS = pytest.mark.parametrize(
    "words",
    [
        pytest.param((RECIPES / "guard.sh", "trl", "sft", "--config", CONFIGURATION), id="guard"),
        pytest.param(("bash", RECIPES / "job.sbatch", CONFIGURATION, "sft"), id="batch job"),
    ],
)


@pytest.mark.parametrize("code", [0, 1, 3])
@SCRIPTS
def test_a_script_starts_only_what_passes_the_check_that_it_names(
    words: tuple[str | Path, ...], code: int, project: Project, tmp_path: Path
) -> None:
    check = tmp_path / "autotune"
    check.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nexit {code}\n', encoding="utf-8")
    check.chmod(0o755)
    path = f"{tmp_path}:{project.environment['PATH']}"
    ended = project.run(*words, AUTOTUNE_CHECK="--memory-budget 1MiB", PATH=path)
    assert ended.returncode == code, ended.stderr
    assert (STARTED in ended.stdout) is (code == 0)
    asked = read_arguments((tmp_path / "words").read_text(encoding="utf-8").splitlines()).arguments
    assert (asked.memory_budget, CONFIGURATION in asked.config) == ("1MiB", True)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("budget", "code"), LIMITS)
@SCRIPTS
def test_a_script_starts_only_what_fits(
    words: tuple[str | Path, ...], budget: str, code: int, project: Project
) -> None:
    ended = project.run(*words, AUTOTUNE_CHECK=f"--memory-budget {budget}")
    assert ended.returncode == code, ended.stderr
    assert (STARTED in ended.stdout) is (code == 0)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("budget", "code"), LIMITS)
def test_the_test_passes_only_what_fits(budget: str, code: int, project: Project) -> None:
    words = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        RECIPES / "test_configurations.py",
    )
    ended = project.run(*words, CONFIGURATIONS=str(project.folder / "configs"), GPU="cpu", MEMORY_BUDGET=budget)
    assert ended.returncode == code, ended.stdout
    assert ("does not fit" in ended.stdout) is (code == 1)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("budget", "code"), LIMITS)
def test_the_action_passes_only_what_fits(budget: str, code: int, project: Project) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {name: str(value.get("default", "")) for name, value in action["inputs"].items()}
    inputs |= {"config": CONFIGURATION, "trainer": "sft", "gpu": "cpu", "package": ""}
    inputs["options"] = f"--memory-budget {budget}"
    codes = []
    for step in action["runs"]["steps"]:
        given = {
            name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in step["env"].items()
        }
        codes.append(project.run("bash", "-eo", "pipefail", "-c", step["run"], **given).returncode)
    assert codes == [0, code]


def test_the_action_takes_files_and_options_on_lines_of_their_own(project: Project, tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (command,) = (step["run"] for step in action["runs"]["steps"] if "CONFIG" in step["env"])
    said = tmp_path / "autotune"
    said.write_text('#!/bin/sh\nprintf "%s|" "$@"\n', encoding="utf-8")
    said.chmod(0o755)
    given = {"OPTIONS": "--when-unsure\nfail\n", "TRAINER": "", "GPU": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    named = {
        "a.yaml\nb.yaml\n": "a.yaml|b.yaml",
        "broken.yaml configs/**/*.yaml": f"broken.yaml|{CONFIGURATION}",
        # What matches nothing is refused by its name, and nothing is run as a command.
        "none/*.yaml $(exit 3)": "none/*.yaml|$(exit|3)",
    }
    for config, files in named.items():
        ended = project.run("bash", "-eo", "pipefail", "-c", command, CONFIG=config, **given)
        assert (ended.returncode, ended.stdout) == (0, f"check|--when-unsure|fail|--no-fit|--|{files}|")


def test_the_hook_leaves_the_files_of_tools_alone() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    tools = (".pre-commit-config.yaml", ".github/workflows/check.yml", "configs/accelerate.yaml")
    assert all(re.search(hook["exclude"], name) for name in tools)
    assert not any(
        re.search(hook["exclude"], name) for name in ("dpo.yaml", "configs/sft.yaml", "a.b/accelerated/c.yml")
    )


@pytest.mark.nightly
def test_the_hook_refuses_a_key_that_is_none(project: Project) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    entry = [*shlex.split(hook["entry"]), "--trainer", "sft", *hook["args"]]
    ended = project.run(*entry, CONFIGURATION, "broken.yaml")
    assert ended.returncode == 2
    assert "Did you mean packing?" in ended.stdout
    # The first of the two can be read.
    assert f"{CONFIGURATION}: reads: no error was found" in ended.stdout


def test_the_workflow_names_options_that_the_command_has() -> None:
    workflow = yaml.safe_load((RECIPES / "workflow.yml").read_text(encoding="utf-8"))
    runs = [step["run"] for step in workflow["jobs"]["check"]["steps"] if "autotune check" in step.get("run", "")]
    assert runs
    for line in runs:
        assert read_arguments(shlex.split(line)[1:]).arguments.trainer == "dpo"
