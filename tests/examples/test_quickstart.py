"""The notebook of the examples runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def code(notebook: Path) -> list[str]:
    """Return the cells of code."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.nightly
def test_its_cells_search_and_train(tmp_path: Path) -> None:
    cells = "\n\n".join([*code(NOTEBOOK), "print('trained', trainer.state.global_step, 'steps')"])
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", cells],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "# The fastest that fits" in done.stdout
    assert "Confirmed by a longer run" in done.stdout
    assert done.stdout.rstrip().endswith("trained 2 steps")


def test_it_is_handed_over_without_results_which_belong_to_one_machine() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []
