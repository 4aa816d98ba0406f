"""A plan's environment variables reach PyTorch in a process that has imported it already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

_SCRIPT = """
import os
import torch
{asked_before}
from autotune.step.jobs.probe import set_environment
set_environment({{"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OTHER": "1"}})
print(torch._C._accelerator_getAllocatorSettings(), os.environ["PYTORCH_ALLOC_CONF"], os.environ["OTHER"])
"""


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="PyTorch 2.11 does not tell its settings"
)
@pytest.mark.parametrize(
    "asked_before",
    ["", pytest.param("torch._C._accelerator_getAllocatorSettings()", marks=pytest.mark.nightly)],
    ids=["settings unread", "settings read"],
)
def test_the_allocator_s_settings_are_those_of_the_plan(asked_before: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(asked_before=asked_before)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.split() == ["expandable_segments:True", "expandable_segments:True", "1"]
