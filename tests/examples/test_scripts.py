"""The notebook, the Python example, the dry-run recipe and the loop without TRL run as described."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import trace_any_step
import yaml

from autotune.cli.parser import read_arguments
from autotune.probing import JobServer
from autotune.virtual import trace
from tests.virtual.alone import printed_by
from tests.virtual.reference import run_on_cpu

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def code(notebook: Path) -> list[str]:
    """Return the cells of code."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.nightly
def test_the_cells_of_the_notebook_search_and_train(tmp_path: Path) -> None:
    shown = "print(result._repr_markdown_())\nprint('trained', trainer.state.global_step, 'steps')"
    cells = "\n\n".join([*code(NOTEBOOK), shown])
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", cells],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "# The fastest that fits" in done.stdout
    assert "Confirmed by a longer run" in done.stdout
    assert done.stdout.rstrip().endswith("trained 2 steps")


def test_the_notebook_is_handed_over_without_results_which_belong_to_one_machine() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []


@pytest.mark.slow
@pytest.mark.nightly
def test_the_python_example_searches_and_trains_two_steps(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    command = [sys.executable, str(EXAMPLES / "python_api.py"), str(small_model_directory), str(small_dataset_file)]
    run = subprocess.run(
        [*command, "--trials", "3", "--output", str(bundle)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "trained 2 steps" in run.stdout
    recommended = json.loads((bundle / "result.json").read_text())["recommended"]
    assert f"recommended: {recommended['candidate']}" in run.stdout


def test_the_loop_prints_the_parts_of_the_peak_and_what_the_allocator_makes_of_them(job_server: JobServer) -> None:
    words = [str(trace_any_step.__file__), "--batch", "2", "--layers", "1", "--gpu", "T4"]
    script = f"import runpy, sys; sys.argv = {words}; runpy.run_path(sys.argv[0], run_name='__main__')"
    lines = printed_by(job_server, script).splitlines()
    printed = dict(line.split(maxsplit=1) for line in lines)
    assert printed.keys() >= {"parameter", "gradient", "activation", "allocated", "reserved", "context"}
    assert lines[-1].endswith("ms on T4")


def test_the_loop_really_takes_what_the_trace_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # Many processors take seconds for a product of ViT-B's width in bfloat16.
    monkeypatch.setattr(trace_any_step, "WIDTH", 192)
    loop = trace_any_step.training(batch=2, layers=1)

    traced, real = trace(loop, target="cpu").phase("step 1"), run_on_cpu(loop, phases="step ")["step 1"]

    assert abs(traced.device_peak.bytes / real.peak_bytes - 1) <= 0.01


def test_the_workflow_of_a_dry_run_runs_the_script_dry() -> None:
    workflow = yaml.safe_load((EXAMPLES / "dry_run" / "workflow.yml").read_text(encoding="utf-8"))
    words = shlex.split(workflow["jobs"]["dry-run"]["steps"][-1]["run"])
    assert words[:2] == ["autotune", "dry-run"]
    found = vars(read_arguments(words[1:]).arguments)
    assert found == {"gpu": "H100-80GB", "timeout": "20m", "command": ["python", "train.py"]}
