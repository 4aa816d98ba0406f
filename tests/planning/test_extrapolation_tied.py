"""Small traces against full-size ones where the head runs the same operators as a layer, on a larger weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.fit import Fit
from autotune.probing import JobServer, trace
from autotune.trainers import find_trainer
from tests.small import write_small_model

pytestmark = pytest.mark.slow

LAYERS, FEW = 16, (2, 3)
SHAPE = Shape(1, 24, 8)


def test_the_gradient_of_a_tied_head_is_not_taken_for_a_layers(job_server: JobServer, tmp_path: Path) -> None:
    # An H100 held 14.5 GiB where 20.8 were foretold: the cast of this gradient was aligned with one in a layer.
    model = write_small_model(
        tmp_path / "model",
        "qwen2",
        weights=False,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=True,
        hidden_size=128,
        vocab_size=4096,
    )
    trainer = find_trainer("online_dpo")
    args = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "bf16": True, "max_new_tokens": 8,
        "max_length": 24, "gradient_checkpointing": False,
    }  # fmt: skip
    plan = TrainingPlan(trainer.name, args, {}, completions=Completions(8, 8))

    def run(depth: int) -> TraceReply:
        request = TraceRequest(
            plan=trainer.traced_plan(plan, Layout.PADDED, SHAPE),
            model=ModelSource(str(model)),
            target="cuda",
            worst=trainer.traced_rows(Layout.PADDED, SHAPE, 1.0),
            layers=depth,
            gpu=find_gpu("H100-80GB"),
        )
        return trace(job_server, request, tmp_path / str(depth))

    foretold, full = Fit({depth: run(depth) for depth in FEW}, LAYERS).forecast(2), run(LAYERS)
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
