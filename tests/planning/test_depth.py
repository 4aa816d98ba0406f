"""The few layers to trace, and the extrapolation from them to all layers."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.core.jobs.traced import Peak, TraceReply
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.program import CONSTRUCTION, OPTIMIZER_STEP
from autotune.core.timeline import Occurrence, Part, Section
from autotune.planning.extrapolation.fit import Fit, layer_weights, match_from_end, match_from_start
from autotune.planning.extrapolation.forecast import Aligned
from autotune.planning.single import depths_of, traced_depths
from autotune.techniques.trace_impact import PlanImpact


@pytest.mark.parametrize(
    ("kinds", "every", "depths"),
    [
        (["full"] * 32, 1, (2, 3)),
        (["full"] * 2, 1, (2,)),
        (["full"] * 32, 2, (2, 4)),
        (["full"] * 31, 2, (3, 5)),
        (["sliding", "full"] * 13, 1, (2, 4)),
        (["dense", *["moe"] * 26], 1, (2, 3)),
        (["dense"] * 3 + ["moe"] * 58, 1, (4, 5)),
        ((["sliding"] * 5 + ["full"]) * 5 + ["sliding"] * 2, 1, (8, 14)),
        (["a", "b", "c"], 1, (3,)),
    ],
)
def test_traced_depths_end_as_the_model_does(kinds: list[str], every: int, depths: tuple[int, ...]) -> None:
    assert traced_depths(kinds, every) == depths


def test_all_layers_are_traced_where_two_depths_have_no_fewer_together() -> None:
    assert traced_depths(["full"] * 5) == (5,)
    assert traced_depths(["full"] * 6) == (2, 3)
    assert traced_depths(["full"] * 21, edges=5) == (21,)
    assert traced_depths(["full"] * 22, edges=5) == (10, 11)


def test_where_weights_are_gathered_ahead_layers_at_either_end_differ() -> None:
    assert traced_depths(["full"] * 32, edges=2) == (4, 5)
    assert traced_depths(["full"] * 32, 2, edges=2) == (8, 10)
    assert traced_depths(["full"] * 5, edges=2) == (5,)


@pytest.mark.parametrize(
    ("adapter", "whole"),
    [
        ({"target_modules": ["q_proj", "fc1"], "layers_to_transform": None, "rank_pattern": {"q_proj": 4}}, False),
        ({"target_modules": r".*layers\.\d+\..*_proj", "base_model_name_or_path": "meta/Llama-3.1-8B"}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, True),
        ({"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 3]]}, True),
        ({"target_modules": r".*layers\.(2[4-9]|3[01])\.self_attn\.q_proj"}, True),
        ({"target_modules": r".*layers\.\d\.self_attn\.q_proj"}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["layers.31.mlp"]}, True),
        ({"target_modules": ["q_proj"], "rank_pattern": {"layers.0.self_attn.q_proj": 4}}, True),
    ],
)
def test_adapters_on_layers_by_their_number_are_traced_with_all_layers(adapter: dict[str, object], whole: bool) -> None:
    depths = (32,) if whole else (2, 3)
    assert depths_of(TrainingPlan("sft", peft={"peft_type": "LORA", **adapter}), ["full"] * 32) == depths
    if isinstance(adapter["target_modules"], str):
        plan = TrainingPlan("sft", model={"lora_target_modules": adapter["target_modules"]})
        assert depths_of(plan, ["full"] * 32) == depths


@pytest.mark.parametrize(("processes", "depths"), [(1, (2, 3)), (2, (2, 4)), (3, (5, 8)), (4, (2, 3))])
def test_adapters_are_traced_at_depths_that_differ_by_whole_layers_in_each_share(
    processes: int, depths: tuple[int, ...]
) -> None:
    sharded, launch = {"deepspeed": {"zero_optimization": {"stage": 1}}}, Launch(processes)
    assert depths_of(TrainingPlan("sft", sharded, {"use_peft": True}, launch=launch), ["full"] * 32) == depths
    assert depths_of(TrainingPlan("sft", sharded, launch=launch), ["full"] * 32) == (2, 3)


def test_what_is_affine_in_layers_follows_from_two_depths() -> None:
    short, long = layer_weights((2, 4), 24)
    assert short * (7 + 3 * 2) + long * (7 + 3 * 4) == pytest.approx(7 + 3 * 24)


def test_a_single_depth_says_nothing_of_another() -> None:
    assert layer_weights((2,), 2) == (1.0,)
    with pytest.raises(ValueError, match="24 layers do not follow from 2"):
        layer_weights((2,), 24)


LAYER = [f"layer {i}" for i in range(15)]
HEAD = LAYER[:3] + [f"head {i}" for i in range(6)]
BACK = [f"back {i}" for i in range(17)]


def model(layers: int) -> list[str]:
    return ["embedding", *LAYER * layers, *HEAD, *BACK * layers, "embedding back"]


def test_a_deeper_model_is_the_shallow_one_with_layers_inserted_in_both_passes() -> None:
    short, long = model(2), model(3)
    start, end = match_from_start(short, long), match_from_end(short, long)
    assert start is not None
    assert end is not None
    assert [long[index] for index in start] == [long[index] for index in end] == short
    # Counted from the end, the last layer's forward is that of the deeper model's last layer; from the start, not.
    assert end[1 + len(LAYER)] - start[1 + len(LAYER)] == len(LAYER)


@pytest.mark.parametrize("place", [1, 63, 64, 65, 130, 199])
def test_the_place_of_an_insertion_is_found_in_a_long_trace(place: int) -> None:
    short = [f"moment {index}" for index in range(200)]
    long = [*short[:place], *["inserted"] * 70, *short[place:]]
    assert match_from_start(short, long) == match_from_end(short, long) == [*range(place), *range(place + 70, 270)]
    assert match_from_start(short, short) == [*range(200)]
    assert match_from_start(short, long[:-1]) is None


def test_a_model_that_does_something_else_is_not_aligned() -> None:
    other = [name.replace("head 4", "another head") for name in model(3)]
    assert match_from_start(model(2), other) is None


def test_moments_are_aligned_where_flat_tensors_are_longer_in_a_deeper_model() -> None:
    update = Part(OPTIMIZER_STEP, Occurrence.ONCE)

    def traced(layers: int) -> TraceReply:
        norms = 3 + 9 * layers
        names = ("aten.mul.Tensor [8, 64]", f"aten.pow.Tensor_Scalar [{norms}]", "aten.mul.Tensor [64, 8]")
        section = Section(update, names, {"temporary": (100, norms, 50)}, backward=len(names))
        return TraceReply(Peak(100), Peak(), 1, 1, 1.0, sections=(section,))

    fit = Fit({2: traced(2), 3: traced(3)}, 32)
    assert fit.aligned
    assert fit.stretches[update, False].course() == [{"temporary": size} for size in (100, 3 + 9 * 32, 50)]


def test_the_course_goes_on_where_an_added_layer_has_more_moments_than_those_that_traces_share() -> None:
    figures = np.arange(1.0, 8.0)[None, :]
    aligned = Aligned("pabcdxq", ["activation"], figures, figures, (0, 5, 5, 5, 5, 0, 0), insertions=5)
    assert len(aligned.course()) == 7 + 5 * 5


@pytest.mark.parametrize(("edges", "highest"), [(0, 9.0), (1, 3.0)])
def test_an_outer_layer_is_aligned_from_its_side_alone_though_its_neighbour_shares_a_part_of_its_moments(
    edges: int, highest: float
) -> None:
    """The run of layers is three moments longer than a layer, of six moments."""
    start, end = np.full((1, 11), 3.0), np.full((1, 11), 3.0)
    end[0, 1:4], start[0, 7:10] = 99.0, 9.0
    aligned = Aligned("m" * 11, ["activation"], start, end, (0, *(6,) * 9, 0), insertions=30, edges=edges)
    assert sum(aligned.highest[1].values()) == highest


@pytest.mark.parametrize("edges", [0, 2, 5])
def test_no_moment_of_a_course_is_above_the_highest_one(edges: int) -> None:
    numbers = np.random.default_rng(0)
    layer_moments = (0, *(3,) * 15, 0)
    start, end = (numbers.integers(0, 9, (2, 17)).astype(float) for _ in range(2))
    aligned = Aligned("m" * 17, "ab", start, end, layer_moments, insertions=27, edges=edges)
    _, highest = aligned.highest
    assert highest in aligned.course()
    assert max(sum(levels.values()) for levels in aligned.course()) == sum(highest.values())


def test_weights_that_are_joined_to_be_sent_do_not_grow_with_every_layer() -> None:
    """DDP's constructor joins some of the weights at a time; the first update may need space for all of them."""

    def reply(layers: int) -> TraceReply:
        levels = {"parameter": (10 * layers,) * 2, "temporary": (10 * layers, 10 * layers)}
        built = Section(Part(CONSTRUCTION, Occurrence.BEFORE), ("", ""), levels, backward=2)
        return TraceReply(Peak(100), Peak(), 1, 1, 1.0, sections=(built,))

    def temporary(layers: int, limit: int) -> list[int]:
        fit = Fit({2: reply(2), 3: reply(3)}, layers, impact=PlanImpact(broadcast_bytes=limit))
        return [levels["temporary"] for stretch in fit.stretches.values() for levels in stretch.course()]

    assert temporary(32, 50) == [50, 320]
    assert temporary(4, 50) == [40, 40]
    # A bucket holds the tensor that fills it.
    assert temporary(32, 25) == [30, 320]
    assert temporary(32, 0) == [320, 320]


def test_the_highest_moment_of_all_layers_is_found_though_another_is_the_highest_of_few() -> None:
    def reply(layers: int) -> TraceReply:
        """The head is the highest, and each layer adds more to the first one's backward pass than to the head."""
        levels = {"parameter": (100 + layers, *(5 * (1 + done) for done in range(layers)))}
        part = Part(OPTIMIZER_STEP, Occurrence.ONCE)
        return TraceReply(
            Peak(100), Peak(), 1, 1, 1.0, sections=(Section(part, ("head", *["layer"] * layers), levels),)
        )

    (stretch,) = Fit({4: reply(4), 5: reply(5)}, 32, impact=PlanImpact(gathers_ahead=1)).stretches.values()
    assert stretch.highest == ("layer", {"parameter": 160})
    assert stretch.course() == [{"parameter": 160}]
