"""The number of layers to trace if the engine shards or gathers state."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.plan import Launch, TrainingPlan
from autotune.planning.single import depths_of
from autotune.techniques.traits import plan_impact
from tests.step.plans import fsdp2, zero

EIGHT = Launch(8)
KINDS = ["layer"] * 32


def test_all_layers_are_traced_for_the_memory_of_zero_2_and_few_for_its_time() -> None:
    plan = TrainingPlan("sft", zero(2), launch=EIGHT)

    assert depths_of(plan, KINDS) == (32,)
    assert depths_of(plan, KINDS, for_memory=False) == (2, 3)


def test_only_engines_that_gather_weights_ahead_are_traced_with_two_layers_at_either_end() -> None:
    plan = TrainingPlan("sft", {}, launch=EIGHT)

    for args, depths in ((zero(3), (4, 5)), (fsdp2(), (4, 5)), (zero(1), (2, 3)), ({}, (2, 3))):
        assert depths_of(replace(plan, args=args), KINDS) == depths


def test_a_buffer_of_gradients_is_neither_on_one_process_nor_where_the_optimizer_is_on_the_host() -> None:
    offloaded = zero(2, offload_optimizer={"device": "cpu"})
    assert plan_impact(TrainingPlan("sft", zero(2), launch=EIGHT)).uneven
    assert not plan_impact(TrainingPlan("sft", zero(2))).uneven
    assert not plan_impact(TrainingPlan("sft", offloaded, launch=EIGHT)).uneven


def test_all_layers_are_traced_where_gradients_of_a_flat_share_are_copied_to_the_host() -> None:
    plan = TrainingPlan("sft", {}, launch=EIGHT)
    to_host = {"offload_optimizer": {"device": "cpu"}}

    for stage in (1, 2):
        offloaded = replace(plan, args=zero(stage, **to_host))
        assert depths_of(offloaded, KINDS) == (32,)
        assert depths_of(replace(offloaded, launch=Launch(1)), KINDS) == (2, 3)
    # Of each tensor, every process has an equal part.
    assert depths_of(replace(plan, args=zero(3, **to_host)), KINDS) == (4, 5)
    on_device = replace(plan, args=zero(2, offload_optimizer={"device": "none"}))
    assert depths_of(on_device, KINDS, for_memory=False) == (2, 3)
