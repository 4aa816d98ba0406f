"""Extrapolations from small traces equal the traces of the whole model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.rows.documents import Documents
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.forecast import Forecast
from autotune.planning.single import depths_of, edges_of, traced_depths
from autotune.probing import trace
from autotune.probing.server import Worker
from autotune.step.data.profile import layer_kinds
from autotune.step.models.loading import meta_model, model_class
from autotune.trainers import find_trainer
from autotune.trainers.distillation import TEACHER, TRAINER
from tests.settings import setting
from tests.small import small_config, write_small_model

pytestmark = pytest.mark.slow

LAYERS = 6
TOKENS, ROWS = 128, 6
MODELS = ("llama", "qwen2", "gemma2", "mistral", "gpt2", "qwen3_moe", "ernie4_5_moe")
FIRST_DIFFER = ("ernie4_5_moe",)
PLANS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "stored": ({"gradient_checkpointing": False}, {}),
    "checkpointed": ({"gradient_checkpointing": True}, {}),
    "every second": ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}, {}),
    "offloaded": ({"gradient_checkpointing": False, "activation_offloading": True}, {}),
    # The inputs of the last layers stay on the device.
    "checkpointed, offloaded": ({"gradient_checkpointing": True, "activation_offloading": True}, {}),
    "lora": ({"gradient_checkpointing": False}, {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}),
}
BY_DAY = (("llama", "lora"), ("llama", "checkpointed, offloaded"))
CASES = [
    pytest.param(*case, marks=() if case in BY_DAY else pytest.mark.nightly)
    for case in dict.fromkeys([*((model, "checkpointed") for model in MODELS), *(("llama", plan) for plan in PLANS)])
]


Run = Callable[[int], TraceReply]


def runs(
    worker: Worker,
    folder: Path,
    model: Path,
    plan: TrainingPlan,
    worst: tuple[tuple[int, ...], ...],
    trainable: float = 1.0,
) -> Run:
    """Return a function that traces a plan with a given number of a model's first layers."""

    def run(depth: int) -> TraceReply:
        source, gpu = ModelSource(str(model)), find_gpu("H100-80GB")
        request = TraceRequest(plan, source, "cuda", worst, trainable=trainable, layers=depth, gpu=gpu)
        return trace(worker, request, folder / str(depth))

    return run


def seconds_of(found: Forecast | TraceReply) -> float | None:
    """Return the time of a step of two micro-batches by a forecast, or by a trace of all layers."""
    forecast = found if isinstance(found, Forecast) else Fit({LAYERS: found}, LAYERS).forecast(2)
    time = forecast.step(2)
    return None if time is None else time.seconds


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_a_full_trace_is_what_small_ones_foretell(model: str, plan: str, worker: Worker, tmp_path: Path) -> None:
    args, words = PLANS[plan]
    sizes = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2, "max_length": TOKENS, "bf16": True}
    planned = TrainingPlan("sft", {**args, **sizes}, words)
    edges = edges_of(planned, setting().workload.model)
    layers = max(LAYERS, 2 * edges + 2)
    directory = write_small_model(tmp_path / "model", model, weights=False, num_hidden_layers=layers)
    run = runs(worker, tmp_path, directory, planned, ((TOKENS,),) * ROWS)
    config = small_config(model, num_hidden_layers=layers)
    kinds = layer_kinds(config, meta_model(model_class(config), config))
    small = Fit({depth: run(depth) for depth in depths_of(planned, kinds, edges=edges)}, layers, edges=edges)
    foretold, full = small.forecast(2), run(layers)

    assert small.aligned
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
    assert foretold.host_bytes == pytest.approx(full.host.bytes, rel=0.005, abs=0.005 * full.device.bytes)
    for category, size in full.device.categories.items():
        assert foretold.highest[1].get(category, 0) == pytest.approx(size, abs=0.005 * full.device.bytes)
    assert foretold.peak_bytes + foretold.overhead_bytes == pytest.approx(full.replayed().allocated_bytes, rel=0.02)
    assert seconds_of(foretold) == pytest.approx(seconds_of(full), rel=0.02)

    # Where the first layers are of another kind, the course between the peaks is drawn with more moments than it has.
    for section in full.sections if model not in FIRST_DIFFER else ():
        for backward, moments in ((False, slice(0, section.backward)), (True, slice(section.backward, None))):
            totals = section.totals[moments]
            stretch = small.stretches.get((section.part, backward))
            course = [sum(levels.values()) for levels in stretch.course()] if stretch is not None else []
            assert len(course) == pytest.approx(len(totals), rel=0.02)
            # Which moments lie in a layer is only known up to the first and the last ones that layers have alike.
            for expected, foretold_bytes in zip(totals, course, strict=False) if len(course) == len(totals) else ():
                assert foretold_bytes == pytest.approx(expected, abs=0.03 * full.device.bytes)


KTO = find_trainer("kto")
KTO_LAYERS = 6
TRAINABLE = 0.5


def documents(rows: int, longest: int) -> Documents:
    """Return rows of which some have long prompts and some have long answers, in random order."""
    source = random.Random(3)
    lengths = [(source.randint(3, longest), source.randint(3, longest)) for _ in range(rows)]
    return Documents.of_rows([KTO.document(parts) for parts in lengths], ordered=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("longest", "checkpointing"), [(80, False), (700, True)], ids=["whole", "in chunks"])
def test_a_full_trace_of_kto_whose_second_tensor_has_its_own_width_is_what_small_ones_foretell(
    longest: int, checkpointing: bool, worker: Worker, tmp_path: Path
) -> None:
    model = write_small_model(tmp_path / "model", weights=False, num_hidden_layers=KTO_LAYERS)
    sizes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_length": 2 * longest}
    plan = TrainingPlan("kto", {"gradient_checkpointing": checkpointing, "bf16": True, **sizes}, {})
    geometry = KTO.geometry(plan, documents(120, longest))

    # Blocks with wider mismatched pairs, and with narrower ones, than rows.
    assert len({shape.second_tokens > shape.tokens for shape in geometry.shapes}) == 2
    for shape in (geometry.shapes[0], geometry.shapes[-1]):
        planned, rows = (
            KTO.traced_plan(plan, geometry.layout, shape),
            KTO.traced_rows(geometry.layout, shape, TRAINABLE),
        )
        run = runs(worker, tmp_path / f"{shape.tokens}-{shape.second_tokens}", model, planned, rows, TRAINABLE)
        small = Fit({depth: run(depth) for depth in traced_depths(["same"] * KTO_LAYERS)}, KTO_LAYERS)
        assert small.aligned
        foretold, full = small.forecast(2), run(KTO_LAYERS)
        assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.01), shape
        assert seconds_of(foretold) == pytest.approx(seconds_of(full), rel=0.05), shape


FEW = (2, 3)
TAUGHT = Shape(4, 96, 24)


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
    args: dict[str, object], words: dict[str, object], worker: Worker, tmp_path: Path
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

    planned, rows = TRAINER.traced_plan(plan, Layout.PADDED, TAUGHT), TRAINER.traced_rows(Layout.PADDED, TAUGHT, 1.0)
    run = runs(worker, tmp_path, model, planned, rows)
    small = Fit({depth: run(depth) for depth in FEW}, LAYERS)
    foretold, full = small.forecast(2), run(LAYERS)

    assert small.aligned
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
    for category, size in full.device.categories.items():
        assert foretold.highest[1].get(category, 0) == pytest.approx(size, abs=0.005 * full.device.bytes)
    assert seconds_of(foretold) == pytest.approx(seconds_of(full), rel=0.02)


TIED_LAYERS, TIED = 5, Shape(1, 24, 8)


@pytest.mark.nightly
def test_the_gradient_of_a_tied_head_is_not_taken_for_a_layers(worker: Worker, tmp_path: Path) -> None:
    # An H100 held 14.5 GiB where 20.8 were foretold: the cast of this gradient was aligned with one in a layer.
    model = write_small_model(
        tmp_path / "model",
        "qwen2",
        weights=False,
        num_hidden_layers=TIED_LAYERS,
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

    planned, rows = trainer.traced_plan(plan, Layout.PADDED, TIED), trainer.traced_rows(Layout.PADDED, TIED, 1.0)
    run = runs(worker, tmp_path, model, planned, rows)
    foretold, full = Fit({depth: run(depth) for depth in FEW}, TIED_LAYERS).forecast(2), run(TIED_LAYERS)
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)


REFERRED_LAYERS, PAIR = 5, (500, 500, 500)


@pytest.mark.nightly
def test_what_the_second_layer_of_a_reference_holds_for_the_first_counts_once(worker: Worker, tmp_path: Path) -> None:
    # A null GPU held 34.3 GiB where 35.9 were foretold: the first layer's output counted once per further layer.
    model = write_small_model(
        tmp_path / "model", "qwen2", weights=False, num_hidden_layers=REFERRED_LAYERS, hidden_size=512,
        intermediate_size=2048,
    )  # fmt: skip
    args = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True, "max_length": 1000,
        "gradient_checkpointing": True,
    }  # fmt: skip
    run = runs(worker, tmp_path, model, TrainingPlan("dpo", args, {}), (PAIR, PAIR))
    foretold, full = Fit({depth: run(depth) for depth in FEW}, REFERRED_LAYERS).forecast(2), run(REFERRED_LAYERS)
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
