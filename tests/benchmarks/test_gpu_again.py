"""Predictions of the present source are as near to measurements on a GPU as the documentation says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.core.files.codec import decode
from autotune.core.step_time import TIME_ERROR
from benchmarks.gpu.accuracy import Outcome, Prediction
from benchmarks.gpu.again import predicted_again
from benchmarks.gpu.cases import CASES

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks/gpu/results/NVIDIA-H200-2026-11-26-predicted.json"
# One of each kind: checkpoints, offloading, packing, padding, two further trainers, and an adapter of a larger model.
SAMPLE = (
    "0.5b rows of 1024 per_device_train_batch_size=8",
    "0.5b rows of 1024 per_device_train_batch_size=4 gradient_checkpointing=off activation_offloading=on",
    "0.5b rows of 256 per_device_train_batch_size=8 packing=bfd",
    "0.5b padded rows per_device_train_batch_size=8",
    "0.5b labelled answers per_device_train_batch_size=4",
    "0.5b ranked pairs per_device_train_batch_size=4",
    "7b adapter rows of 1024 per_device_train_batch_size=4",
)
SECONDS = 400.0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_predicted_anew_is_within_the_stated_errors_of_what_was_measured() -> None:
    document = json.loads(MEASURED.read_text(encoding="utf-8"))
    measured = {outcome.name: outcome.measured for outcome in (decode(Outcome, each) for each in document["cases"])}
    cases = [case for case in CASES if case.name in SAMPLE]
    assert len(cases) == len(SAMPLE)
    found = predicted_again(document["device"], cases, {}, SECONDS, document.get("launch_seconds"))
    errors = {}
    for name in SAMPLE:
        planned, ran = found[name]["planned"], measured[name]
        assert isinstance(planned, Prediction), planned
        assert ran is not None
        assert ran.reserved_bytes
        assert ran.step_seconds
        assert planned.reserved_bytes
        assert planned.step_seconds
        memory, time = planned.reserved_bytes / ran.reserved_bytes - 1, planned.step_seconds / ran.step_seconds - 1
        if abs(memory) > planned.error or abs(time) > TIME_ERROR:
            errors[name] = f"memory {memory:+.1%} of ±{planned.error:.0%}, time {time:+.0%} of ±{TIME_ERROR:.0%}"
    assert not errors
