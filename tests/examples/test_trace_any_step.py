"""The example of a training loop that is not TRL's: it traces, and what it says is what the loop really takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trace_any_step

from autotune.virtual import trace
from tests.virtual.reference import run_on_cpu

SCRIPT = Path(trace_any_step.__file__)
ROOT = SCRIPT.parents[1]


def test_it_prints_the_parts_of_the_peak_and_what_the_allocator_makes_of_them() -> None:
    command = [sys.executable, str(SCRIPT), "--batch", "2", "--layers", "1", "--gpu", "T4"]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    )

    assert run.returncode == 0, run.stderr
    printed = dict(line.split(maxsplit=1) for line in run.stdout.splitlines())
    assert printed.keys() >= {"parameter", "gradient", "activation", "allocated", "reserved", "context"}
    assert run.stdout.splitlines()[-1].endswith("ms on T4")


def test_the_loop_really_takes_what_the_trace_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # Many processors take seconds for a product of ViT-B's width in bfloat16.
    monkeypatch.setattr(trace_any_step, "WIDTH", 192)
    loop = trace_any_step.training(batch=2, layers=1)

    traced, real = trace(loop, target="cpu").phase("step 1"), run_on_cpu(loop, phases="step ")["step 1"]

    assert abs(traced.device_peak.bytes / real.peak_bytes - 1) <= 0.01
