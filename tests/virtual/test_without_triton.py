"""A trace for a GPU where Triton is not installed, as beside a build of PyTorch for the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """
import json, sys
from collections import Counter
if sys.argv[1] == "missing":
    sys.modules["triton"] = None
from tests.small import small_tokenizer
from tests.virtual.models import config_of
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import Caller
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.virtual import trace

args = {"per_device_train_batch_size": 2, "max_length": 64, "bf16": True}
steps = traced_training(TrainingPlan("sft", args=args), config_of("llama"), small_tokenizer(), TracedRows([(64,)]))
traced = trace(steps)
names = Counter(operator.name for operator in traced.operators)
for operator in traced.operators:
    assert (operator.work.caller is Caller.LIBRARY) == operator.name.startswith("triton.")
print(json.dumps({"bytes": [event.change_bytes for event in traced.events], "operators": names}))
"""
ROOT = Path(__file__).resolve().parents[2]


def _traced(triton: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, triton],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_without_triton_a_trace_is_what_it_is_with_it() -> None:
    pytest.importorskip("triton")
    missing = _traced("missing")

    assert missing["operators"]["triton._forward_kernel"] > 0
    assert missing == _traced("installed")
