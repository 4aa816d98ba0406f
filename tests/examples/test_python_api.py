"""The Python example searches and then trains with TRL's own trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "python_api.py"


@pytest.mark.slow
@pytest.mark.nightly
def test_it_searches_and_trains_two_steps(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    command = [sys.executable, str(SCRIPT), str(small_model_directory), str(small_dataset_file)]
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
