"""Small traces against full-size ones: what follows from few layers is what the whole model needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.batch_geometry import Shape
from autotune.core.plan import TrainingPlan
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.fit import Fit
from autotune.probing import JobServer, trace
from autotune.step.models.layer_kinds import layer_kinds
from autotune.step.models.loading import meta_model, model_class
from tests.small import small_config, write_small_model

pytestmark = pytest.mark.slow

LAYERS = 8
TOKENS = 128
FULL = Shape(6, TOKENS)
MODELS = ("llama", "qwen2", "gemma2", "mistral", "gpt2", "qwen3_moe", "ernie4_5_moe")
FIRST_DIFFER = ("ernie4_5_moe",)
PLANS: dict[str, tuple[dict[str, object], dict[str, object], int]] = {
    "stored": ({"gradient_checkpointing": False}, {}, 1),
    "checkpointed": ({"gradient_checkpointing": True}, {}, 1),
    "every second": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}, {}, 2,
    ),
    "offloaded": ({"gradient_checkpointing": False, "activation_offloading": True}, {}, 1),
    "lora": (
        {"gradient_checkpointing": False}, {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}, 1,
    ),
}  # fmt: skip
BY_DAY = (("llama", "checkpointed"), ("llama", "lora"), ("qwen3_moe", "checkpointed"))
CASES = [
    pytest.param(*case, marks=() if case in BY_DAY else pytest.mark.nightly)
    for case in dict.fromkeys([*((model, "checkpointed") for model in MODELS), *(("llama", plan) for plan in PLANS)])
]


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_a_full_trace_is_what_small_ones_foretell(model: str, plan: str, job_server: JobServer, tmp_path: Path) -> None:
    args, words, every = PLANS[plan]
    source = ModelSource(str(write_small_model(tmp_path / "model", model, weights=False, num_hidden_layers=LAYERS)))

    def run(depth: int, shape: Shape) -> TraceReply:
        sizes = {
            "per_device_train_batch_size": shape.rows,
            "gradient_accumulation_steps": 2,
            "max_length": TOKENS,
            "bf16": True,
        }
        request = TraceRequest(
            plan=TrainingPlan("sft", {**args, **sizes}, words),
            model=source,
            target="cuda",
            worst=((TOKENS,),) * shape.rows,
            layers=depth,
            gpu=find_gpu("H100-80GB"),
        )
        return trace(job_server, request, tmp_path / f"{depth}-{shape.rows}")

    config = small_config(model, num_hidden_layers=LAYERS)
    kinds = layer_kinds(config, meta_model(model_class(config), config))
    small = Fit({depth: run(depth, FULL) for depth in traced_depths(kinds, every)}, LAYERS)
    foretold, full = small.forecast(2), run(LAYERS, FULL)

    assert small.aligned
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
    assert foretold.host_bytes == pytest.approx(full.host.bytes, rel=0.005, abs=0.005 * full.device.bytes)
    for category, size in full.device.categories.items():
        assert foretold.categories.get(category, 0) == pytest.approx(size, abs=0.005 * full.device.bytes)
    assert foretold.peak_bytes + foretold.overhead_bytes == pytest.approx(full.allocated_bytes, rel=0.02)
    assert full.step is not None
    assert foretold.step_seconds(2) == pytest.approx(full.step.seconds, rel=0.02)

    # Where the first layers are of another kind, the course between the peaks is drawn with more moments than it has.
    for section in full.sections if model not in FIRST_DIFFER else ():
        for backward, moments in ((False, slice(0, section.backward)), (True, slice(section.backward, None))):
            totals = section.totals[moments]
            course = [sum(levels.values()) for levels in small.course((section.part, backward))]
            assert len(course) == pytest.approx(len(totals), rel=0.02)
            # Which moments lie in a layer is only known up to the first and the last ones that layers have alike.
            for expected, foretold_bytes in zip(totals, course, strict=False) if len(course) == len(totals) else ():
                assert foretold_bytes == pytest.approx(expected, abs=0.03 * full.device.bytes)
