"""Small traces against full-size ones where there is a teacher, which has all its layers in both."""

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
from autotune.trainers.distillation import TEACHER, TRAINER
from tests.small import write_small_model

pytestmark = pytest.mark.slow

LAYERS, FEW = 8, (2, 3)
SHAPE = Shape(4, 96, 24)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param({"gradient_checkpointing": True}, {}, id="checkpointed"),
        pytest.param(
            {"gradient_checkpointing": False, "beta": 0.5},
            {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"},
            id="stored, LoRA",
        ),
    ],
)
def test_a_full_trace_is_what_those_of_few_layers_of_the_student_foretell(
    args: dict[str, object], words: dict[str, object], job_server: JobServer, tmp_path: Path
) -> None:
    model = write_small_model(tmp_path / "model", weights=False, num_hidden_layers=LAYERS)
    # Layers like the student's, but wider.
    teacher = write_small_model(tmp_path / "teacher", weights=False, hidden_size=128, num_hidden_layers=6)
    plan = TrainingPlan(
        TRAINER.name,
        {
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, TEACHER: str(teacher),
            "max_completion_length": 24, **args,
        },
        words,
        completions=Completions(24, 24),
    )  # fmt: skip

    def run(depth: int) -> TraceReply:
        request = TraceRequest(
            plan=TRAINER.traced_plan(plan, Layout.PADDED, SHAPE),
            model=ModelSource(str(model)),
            target="cuda",
            worst=TRAINER.traced_rows(Layout.PADDED, SHAPE, 1.0),
            layers=depth,
            gpu=find_gpu("H100-80GB"),
        )
        return trace(job_server, request, tmp_path / str(depth))

    small = Fit({depth: run(depth) for depth in FEW}, LAYERS)
    foretold, full = small.forecast(2), run(LAYERS)

    assert small.aligned
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
    for category, size in full.device.categories.items():
        assert foretold.categories.get(category, 0) == pytest.approx(size, abs=0.005 * full.device.bytes)
    assert full.step is not None
    assert foretold.step_seconds(2) == pytest.approx(full.step.seconds, rel=0.02)
