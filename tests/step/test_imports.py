"""The imports before the fork leave the accelerator and the environment to the child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.core.plan import ALLOCATOR_VARIABLES
from autotune.probing import JobServer
from tests.virtual.alone import apart


def _said(script: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


@pytest.mark.nightly
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


def test_the_default_allocator_is_pytorch_s_whatever_the_shell_has_set() -> None:
    script = f"""
import os
from autotune.step.imports import prepare_environment
os.environ.update(dict.fromkeys({ALLOCATOR_VARIABLES}, "expandable_segments:True"))
prepare_environment("cuda", 1)
print([name for name in {ALLOCATOR_VARIABLES} if name in os.environ])
"""
    assert _said(script) == ["[]"]


tells_settings = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="PyTorch 2.11 does not tell its settings"
)
_EXPANDED = "expandable_segments:True"


def settings_of_a_probe(asked_before: bool) -> list[str]:
    """Set the environment as a probe does, and return the settings of PyTorch's allocator, and variables."""
    from autotune.step.jobs.probe import set_environment

    if asked_before:
        torch._C._accelerator_getAllocatorSettings()
    set_environment({**dict.fromkeys(ALLOCATOR_VARIABLES, _EXPANDED), "OTHER": "1"})
    return [torch._C._accelerator_getAllocatorSettings(), os.environ["PYTORCH_ALLOC_CONF"], os.environ["OTHER"]]


@tells_settings
@pytest.mark.parametrize("asked_before", [False, True])
def test_the_allocator_s_settings_are_those_of_the_plan_in_a_probe(asked_before: bool, job_server: JobServer) -> None:
    assert apart(job_server, settings_of_a_probe, asked_before) == [_EXPANDED, _EXPANDED, "1"]


_TRAINING = """
import os, torch
from autotune.core.plan import ALLOCATOR_VARIABLES
os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True"))
print(torch._C._accelerator_getAllocatorSettings())
"""


@tells_settings
@pytest.mark.parametrize(
    "of_shell", ["PYTORCH_ALLOC_CONF", pytest.param("PYTORCH_CUDA_ALLOC_CONF", marks=pytest.mark.nightly)]
)
def test_the_allocator_s_settings_are_those_of_the_plan_in_a_training(of_shell: str) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), of_shell: "garbage_collection_threshold:0.8"}
    assert subprocess.check_output([sys.executable, "-c", _TRAINING], text=True, env=environment).split() == [_EXPANDED]
