"""The number of layers to trace if the engine shards or gathers state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.plan import Launch, TrainingPlan
from autotune.planning.single import depths_of, edges_of
from autotune.techniques.traits import plan_impact
from tests.settings import setting
from tests.step.plans import fsdp2, zero

EIGHT = Launch(8)
KINDS = ["layer"] * 32


def test_all_layers_are_traced_for_the_memory_of_zero_2_and_few_for_its_time() -> None:
    plan = TrainingPlan("sft", zero(2), launch=EIGHT)

    assert depths_of(plan, KINDS) == (32,)
    assert depths_of(plan, KINDS, for_memory=False) == (2, 3)


@pytest.mark.parametrize(
    ("args", "adapts", "edges"),
    [
        (zero(3), False, 2),
        (zero(3), True, 3),
        (zero(3, stage3_max_live_parameters=1e8), True, 2),
        (zero(3, stage3_max_live_parameters=1e10), True, 5),
        (fsdp2(), True, 2),
        (zero(1), True, 0),
        ({}, True, 0),
    ],
)
def test_engines_that_gather_weights_ahead_are_traced_with_the_layers_at_either_end_that_differ(
    args: dict[str, Any], adapts: bool, edges: int
) -> None:
    plan = TrainingPlan("sft", args, {"use_peft": adapts}, launch=EIGHT)
    # Llama-3.1-8B: 218 million weights in a layer, and 525 million in the head.
    model = replace(
        setting().workload.model, layer_kinds=(*KINDS,), quantizable=32 * 218_103_808, largest_weight=525_336_576
    )

    assert edges_of(plan, model) == edges
    assert depths_of(plan, KINDS, edges=edges) == (max(2, 2 * edges), max(2, 2 * edges) + 1)


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
    assert depths_of(replace(plan, args=zero(3, **to_host)), KINDS) == (2, 3)
    on_device = replace(plan, args=zero(2, offload_optimizer={"device": "none"}))
    assert depths_of(on_device, KINDS, for_memory=False) == (2, 3)
