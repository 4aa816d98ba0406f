"""What the server imports before it forks leaves the accelerator to its children."""

from __future__ import annotations

import subprocess
import sys


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
