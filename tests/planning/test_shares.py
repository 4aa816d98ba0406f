"""What a rank holds that is no sum over layers is that of the whole model."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.batch_geometry import Shape
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.program import OPTIMIZER_STEP
from autotune.core.timeline import Section
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.planning.points import traced_points, with_shares_of
from autotune.techniques.traits import between_layers, impact_in
from tests.planning.stand_in import WEIGHT_BYTES, AnalyticTracer
from tests.step.plans import fsdp2, zero

SHAPE, SMALL = Shape(4, 256), Shape(2, 64)
EIGHT = Launch(8)
KINDS = ["layer"] * 32


def traced(layers: int) -> TraceReply:
    args = {"per_device_train_batch_size": 1, "packing": False, "optim": "adamw_torch"}
    request = TraceRequest(TrainingPlan("sft", args), ModelSource("small"), "cuda", ((64,),), layers=layers)
    (reply,) = AnalyticTracer()([request])
    assert isinstance(reply, TraceReply)
    return reply


def in_update(reply: TraceReply) -> Section:
    return next(section for section in reply.sections if section.part.phase == OPTIMIZER_STEP)


def test_gradients_between_micro_batches_and_the_update_are_those_of_the_whole_model() -> None:
    few, whole = traced(4), traced(32)
    found = with_shares_of(whole, few)

    assert in_update(found) == replace(in_update(whole), time=in_update(few).time)
    for section, of_few in zip(found.sections, few.sections, strict=True):
        if section.part.of_micro_batch:
            times = of_few.levels["gradient"][0] // (4 * WEIGHT_BYTES)
            assert set(section.levels["gradient"]) == {times * 32 * WEIGHT_BYTES}
            assert {**section.levels, "gradient": ()} == {**of_few.levels, "gradient": ()}


def points(*depths: int) -> list[tuple[int, Shape]]:
    return [(depth, SHAPE) for depth in depths]


def test_the_whole_model_is_traced_for_zero_2_alone_and_on_few_rows() -> None:
    plan = TrainingPlan("sft", zero(2), launch=EIGHT)

    assert list(traced_points(plan, KINDS, SHAPE)) == [*points(2, 3), (32, SMALL)]
    assert list(traced_points(plan, KINDS[:3], SHAPE)) == points(3)


def test_one_trace_of_the_whole_model_serves_all_sizes() -> None:
    plan = TrainingPlan("sft", zero(2), launch=EIGHT)
    sizes = (SHAPE, Shape(8, 6784, filled=0.7, trained=0.4), Shape(2, 513, beside=700.0), Shape(4, 90, evaluated=True))

    assert {list(traced_points(plan, KINDS, size))[-1] for size in sizes} == {(32, SMALL)}
    # Completions are generated there, too, and the rows with images are those of the dataset.
    generated, images = Shape(8, 900, generated=500), Shape(4, 900, chosen=(3, 1))
    assert list(traced_points(plan, KINDS, generated))[-1] == (32, Shape(2, 64, generated=32))
    assert list(traced_points(plan, KINDS, images))[-1] == (32, replace(images, rows=2))


def test_only_engines_that_gather_weights_ahead_are_traced_with_two_layers_at_either_end() -> None:
    plan = TrainingPlan("sft", {}, launch=EIGHT)

    for args, depths in ((zero(3), (4, 5)), (fsdp2(), (4, 5)), (zero(1), (2, 3)), ({}, (2, 3))):
        assert list(traced_points(replace(plan, args=args), KINDS, SHAPE)) == points(*depths)


def test_a_buffer_of_gradients_is_neither_on_one_process_nor_where_the_optimizer_is_on_the_host() -> None:
    offloaded = zero(2, offload_optimizer={"device": "cpu"})
    assert impact_in(TrainingPlan("sft", zero(2), launch=EIGHT)).uneven
    assert not impact_in(TrainingPlan("sft", zero(2))).uneven
    assert not impact_in(TrainingPlan("sft", offloaded, launch=EIGHT)).uneven


def test_all_layers_are_traced_where_gradients_of_a_flat_share_are_copied_to_the_host() -> None:
    plan = TrainingPlan("sft", {}, launch=EIGHT)
    to_host = {"offload_optimizer": {"device": "cpu"}}

    for stage in (1, 2):
        offloaded = replace(plan, args=zero(stage, **to_host))
        assert list(traced_points(offloaded, KINDS, SHAPE)) == points(32)
        assert list(traced_points(replace(offloaded, launch=Launch(1)), KINDS, SHAPE)) == points(2, 3)
    # Of each tensor, every process has an equal part.
    assert list(traced_points(replace(plan, args=zero(3, **to_host)), KINDS, SHAPE)) == points(4, 5)
    on_device = replace(plan, args=zero(2, offload_optimizer={"device": "none"}))
    assert list(traced_points(on_device, KINDS, SHAPE)) == [*points(2, 3), (32, SMALL)]


def test_plans_that_compute_their_layers_differently_hold_the_same_between_them() -> None:
    plan = TrainingPlan("sft", {**zero(2), "optim": "adamw_torch"}, launch=EIGHT)
    checkpointed = replace(plan, args={**plan.args, "gradient_checkpointing": True, "use_liger_kernel": True})
    assert between_layers(checkpointed) == between_layers(plan)
    assert between_layers(replace(plan, args={**plan.args, "optim": "adafactor"})) != between_layers(plan)
