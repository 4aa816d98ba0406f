"""Small traces against full-size ones for KTO, whose second tensor has a width of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from autotune.core.batch_geometry import Shape
from autotune.core.documents import Documents
from autotune.core.plan import TrainingPlan
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.fit import Fit
from autotune.probing import JobServer, trace
from autotune.trainers import find_trainer
from tests.small import write_small_model

pytestmark = pytest.mark.slow

KTO = find_trainer("kto")
LAYERS = 6
TRAINABLE = 0.5


def documents(rows: int, longest: int) -> Documents:
    """Return rows of which some have long prompts and some have long answers, in random order."""
    source = random.Random(3)
    lengths = [(source.randint(3, longest), source.randint(3, longest)) for _ in range(rows)]
    return Documents.of_rows([KTO.document(parts) for parts in lengths], ordered=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("longest", "checkpointing"), [(80, False), (700, True)], ids=["whole", "in chunks"])
def test_a_full_trace_is_what_small_ones_foretell(
    longest: int, checkpointing: bool, job_server: JobServer, tmp_path: Path
) -> None:
    source = ModelSource(str(write_small_model(tmp_path / "model", weights=False, num_hidden_layers=LAYERS)))
    sizes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_length": 2 * longest}
    plan = TrainingPlan("kto", {"gradient_checkpointing": checkpointing, "bf16": True, **sizes}, {})
    geometry = KTO.geometry(plan, documents(120, longest))

    def run(depth: int, shape: Shape) -> TraceReply:
        request = TraceRequest(
            plan=KTO.traced_plan(plan, geometry.layout, shape),
            model=source,
            target="cuda",
            worst=KTO.traced_rows(geometry.layout, shape, TRAINABLE),
            trainable=TRAINABLE,
            layers=depth,
            gpu=find_gpu("H100-80GB"),
        )
        return trace(job_server, request, tmp_path / f"{depth}-{shape.rows}-{shape.tokens}-{shape.beside}")

    # Blocks with wider mismatched pairs, and with narrower ones, than rows.
    assert len({shape.beside > shape.tokens for shape in geometry.shapes}) == 2
    for shape in (geometry.shapes[0], geometry.shapes[-1]):
        small = Fit({depth: run(depth, shape) for depth in traced_depths(["same"] * LAYERS)}, LAYERS)
        assert small.aligned
        foretold, full = small.forecast(2), run(LAYERS, shape)
        assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.01), shape
        assert full.step is not None
        assert foretold.step_seconds(2) == pytest.approx(full.step.seconds, rel=0.05), shape
