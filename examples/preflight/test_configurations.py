"""A test for your project: every configuration in a folder runs and fits its GPU.

    CONFIGURATIONS=configs GPU=H100-80GB pytest test_configurations.py

The folder has one folder for each trainer, such as ``configs/dpo/large.yaml``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import autotune

FOLDER = Path(os.environ.get("CONFIGURATIONS", "configs"))
GPU = os.environ.get("GPU", "H100-80GB")
BUDGET = os.environ.get("MEMORY_BUDGET")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*/*.yaml")), ids=str)
def test_a_configuration_runs_and_fits(file: Path) -> None:
    """``autotune.check`` raises what will not, with the reason and the change that helps."""
    autotune.check(file, trainer=file.parent.name, gpu=GPU, memory_budget=BUDGET, when_unsure="fail")
