"""Small traces of sharded plans against full-size ones: engines gather the weights of the next layers ahead."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from autotune.core.batch_geometry import Shape
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.protocol import TraceRequest
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.shape import Anchors, Basis
from autotune.probing import JobServer, trace_all
from tests.small import write_small_model
from tests.step.plans import fsdp2, zero

LAYERS, RANKS = 12, 8
ROWS, TOKENS = 2, 128
SHAPE = Shape(ROWS, TOKENS)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
nightly = pytest.mark.nightly
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("args", "error"),
    [
        pytest.param({"gradient_checkpointing": True}, 0.005, marks=nightly),
        pytest.param(fsdp2(), 0.005, marks=nightly),
        ({**fsdp2(), "gradient_checkpointing": True}, 0.005),
        pytest.param(zero(3), 0.005, marks=[needs_deepspeed, nightly]),
        pytest.param({**zero(3), "gradient_checkpointing": True}, 0.005, marks=[needs_deepspeed, nightly]),
        # The share of the gradients that a rank owns ends somewhere within a layer, elsewhere for each depth.
        pytest.param(zero(2), 0.03, marks=[needs_deepspeed, nightly]),
        pytest.param({**zero(2), "gradient_checkpointing": True}, 0.05, marks=[needs_deepspeed, nightly]),
    ],
    ids=["ddp", "fsdp2", "fsdp2-checkpointed", "zero3", "zero3-checkpointed", "zero2", "zero2-checkpointed"],
)
def test_a_full_trace_is_what_small_ones_foretell(
    args: dict[str, Any], error: float, job_server: JobServer, tmp_path: Path
) -> None:
    source = ModelSource(
        str(write_small_model(tmp_path / "model", weights=False, num_hidden_layers=LAYERS, hidden_size=128))
    )
    shape = {"per_device_train_batch_size": ROWS, "max_length": TOKENS, "bf16": True,
             "gradient_accumulation_steps": 2, "gradient_checkpointing": False}  # fmt: skip
    plan = TrainingPlan("sft", {**shape, **args}, launch=Launch(RANKS))
    few = traced_depths(["layer"] * LAYERS, edges=True)
    assert few == (3, 4)

    replies, failure = trace_all(
        job_server,
        [
            TraceRequest(
                plan=plan,
                model=source,
                target="cuda",
                worst=((TOKENS,),) * ROWS,
                layers=depth,
                gpu=find_gpu("H100-80GB"),
            )
            for depth in (*few, LAYERS)
        ],
        tmp_path / "job",
        250.0,
    )
    assert failure is None
    *small, full = replies
    fit = Fit(
        Anchors(Basis.CONSTANT, (SHAPE,)),
        {(depth, SHAPE): reply for depth, reply in zip(few, small, strict=True)},
        edges=True,
    )
    foretold = fit.forecast(LAYERS, SHAPE, 2)

    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=error)
    assert foretold.host_bytes == pytest.approx(full.host.bytes, rel=0.01)
    for section in full.sections:
        if section.part.of_micro_batch:
            totals = [sum(levels.values()) for (part, _), levels in foretold.stretches.items() if part == section.part]
            assert max(totals) == pytest.approx(max(section.totals), rel=error)
