"""What the server imports before it forks leaves accelerator and environment to its children."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.core.plan import ALLOCATOR_VARIABLES


def _said(script: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_the_library_that_touches_cuda_is_not_run_before_the_fork_and_works_after_it() -> None:
    script = """
import os, sys
from autotune.step.imports import accelerator_is_initialized, prepare_environment, preload
prepare_environment("cuda", 1)
preload("cuda")
print(type(sys.modules["bitsandbytes"]).__name__, accelerator_is_initialized(), flush=True)
if os.fork() == 0:
    import bitsandbytes
    print(bitsandbytes.nn.Linear4bit.__name__, flush=True)
    os._exit(0)
os.wait()
"""
    assert _said(script) == ["_LazyModule False", "Linear4bit"]


def test_one_gpu_is_seen_for_cuda_in_the_driver_s_order_and_none_for_the_cpu() -> None:
    script = """
import os
from autotune.step.imports import prepare_environment
os.environ["CUDA_VISIBLE_DEVICES"] = "3,5"
prepare_environment("cuda", 1)
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"])
prepare_environment("cpu", 1)
print(repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"""
    assert _said(script) == ["3 PCI_BUS_ID", "''"]


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_the_default_allocator_is_pytorch_s_whatever_the_shell_has_set(variable: str) -> None:
    script = f"""
import os
from autotune.step.imports import prepare_environment
os.environ["{variable}"] = "expandable_segments:True"
prepare_environment("cuda", 1)
print("{variable}" in os.environ)
"""
    assert _said(script) == ["False"]


_SCRIPT = """
import os
import torch
{asked_before}
from autotune.core.plan import ALLOCATOR_VARIABLES
from autotune.step.jobs.probe import set_environment
{set}({{**dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True"), "OTHER": "1"}})
print(torch._C._accelerator_getAllocatorSettings(), os.environ["PYTORCH_ALLOC_CONF"], os.environ["OTHER"])
"""
_PROBE, _TRAINING = "set_environment", "os.environ.update"


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="PyTorch 2.11 does not tell its settings"
)
@pytest.mark.parametrize(
    ("sets", "asked_before", "of_shell"),
    [
        (_PROBE, "", ""),
        pytest.param(_PROBE, "torch._C._accelerator_getAllocatorSettings()", "", marks=pytest.mark.nightly),
        (_TRAINING, "", "PYTORCH_ALLOC_CONF"),
        (_TRAINING, "", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
    ids=["settings unread", "settings read", "newer name in the shell", "older name in the shell"],
)
def test_the_allocator_s_settings_are_those_of_the_plan(sets: str, asked_before: str, of_shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(set=sets, asked_before=asked_before)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), of_shell or "OTHER": "garbage_collection_threshold:0.8"},
    )
    assert done.stdout.split() == ["expandable_segments:True", "expandable_segments:True", "1"]
