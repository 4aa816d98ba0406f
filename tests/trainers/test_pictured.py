"""Micro-batches of rows with images: the rows of the dataset that a plan is traced on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from math import comb

import numpy as np
import pytest

from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry
from autotune.core.rows.documents import Documents
from autotune.core.rows.heaviest import RowSummary
from autotune.core.rows.images import ImageProfile
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.rows.table import Table
from autotune.core.workload import Workload
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import otherwise_padded, whole_geometry
from tests.settings import pictured_workload

# Tokens and numbers of pixels of each row: the longest has no image, and the most pictured is short.
ROWS = [(90, 0), (20, 5000), (40, 1000), (41, 1000), (60, 2000), (30, 3000), (25, 0), (70, 500)]


def of_rows(*rows: tuple[int, int]) -> Workload:
    """Return a workload of rows of so many tokens and pixels, of which the loss counts all tokens."""
    base = pictured_workload()
    tokens, elements = zip(*rows, strict=True)
    flat = LengthDistribution({1: len(rows)})
    images = ImageProfile(flat, flat, flat, flat, Table([tokens, tokens, tokens, elements]))
    lengths = LengthDistribution({length: tokens.count(length) for length in set(tokens)})
    return replace(base, dataset=replace(base.dataset, lengths=lengths, images=images))


def geometry_of(of: Workload, rows: int, **args: object) -> BatchGeometry:
    """Return the micro-batches of a plan with this number of rows."""
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "max_length": None}
    return whole_geometry(find_trainer("sft"), TrainingPlan("sft", {**sizes, **args}, {}), of)


def load(chosen: Iterable[int]) -> tuple[int, int]:
    """Return the width and the pixels of a micro-batch."""
    tokens, pixels = zip(*(ROWS[row] for row in chosen), strict=True)
    return max(tokens), sum(pixels)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_no_micro_batch_is_wider_and_has_more_pixels_than_those_that_are_traced(rows: int) -> None:
    found = [load(shape.chosen) for shape in geometry_of(of_rows(*ROWS), rows).shapes]
    every = [load(some) for some in combinations(range(len(ROWS)), rows)]
    assert max(width for width, _ in found) == max(width for width, _ in every)
    assert max(pixels for _, pixels in found) == max(pixels for _, pixels in every)
    # The widest row with the most pictured ones is among them, if that is more than each.
    widest = max(pixels for width, pixels in every if width == max(ROWS)[0])
    assert (max(ROWS)[0], widest) in found


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
@pytest.mark.parametrize(
    ("rows", "batch", "copies"), [(1, 2, 2), (2, 2, 2), (4, 1, 2), (2, 3, 2), (3, 2, 2), (2, 3, 3)]
)
def test_no_generation_and_no_micro_batch_of_it_has_more_pixels_than_those_that_are_traced(
    trainer: str, rows: int, batch: int, copies: int
) -> None:
    """TRL pads all completions of a generation together, and draws which of them share a micro-batch."""
    prompts = ROWS[:5]
    args = {"num_generations": copies, "max_completion_length": 16, "steps_per_generation": batch}
    plan = TrainingPlan(
        trainer, {"per_device_train_batch_size": rows, "gradient_accumulation_steps": batch, **args}, {}
    )
    plan = replace(plan, completions=Completions(8.0, 8.0))
    geometry = whole_geometry(find_trainer(trainer), plan, of_rows(*prompts))

    def loads(drawn: Iterable[int], *, drawn_first: bool = False) -> set[tuple[int, int, int]]:
        """Return the width, the pixels of the generation and those of its first micro-batches, in any order or one."""
        every = [row for row in drawn for _ in range(copies)]
        width, pixels = max(prompts[row][0] for row in every), [prompts[row][1] for row in every]
        orders = [pixels] if drawn_first else permutations(pixels)
        return {(width, sum(pixels), sum(order[:rows])) for order in orders}

    traced = {load for shape in geometry.shapes for load in loads(shape.chosen, drawn_first=True)}
    possible = {load for some in combinations(range(len(prompts)), rows * batch // copies) for load in loads(some)}
    assert traced <= possible
    for place in range(3):
        assert max(load[place] for load in traced) == max(load[place] for load in possible)
    widest = max(load[0] for load in possible)
    assert max(load[1:] for load in traced if load[0] == widest) == max(
        load[1:] for load in possible if load[0] == widest
    )
    assert {shape.tokens - 16 for shape in geometry.shapes} == {load[0] for load in traced}
    assert all(phase.shape_for(shape) == shape for phase in geometry.phases for shape in geometry.shapes)


Answered = tuple[int, int, int]
"""Tokens of a prompt and of its answer, and its pixels."""


def of_answers(rows: Sequence[Answered]) -> Workload:
    """Return a workload of labelled answers, to train and to evaluate on."""
    base, (prompts, answers, elements) = pictured_workload("prompt+completion+label"), np.array(rows).T
    flat = LengthDistribution({1: len(rows)})
    images = ImageProfile(flat, flat, flat, flat, Table([prompts + answers, prompts + answers, answers, elements]))
    documents = Documents.of_rows(np.stack([prompts + 1, prompts + answers], axis=1), ordered=True)
    dataset = replace(base.dataset, lengths=LengthDistribution(documents.widths), images=images, several=documents)
    return replace(base, trainer="kto", dataset=dataset, evaluation=dataset)


def drawn_answers(seed: int, count: int) -> list[Answered]:
    """Return this number of random rows."""
    of = np.random.default_rng(seed)
    return [(int(of.integers(1, 60)), int(of.integers(1, 60)), int(of.integers(0, 4)) * 1000) for _ in range(count)]


def answered_load(block: Sequence[Answered]) -> tuple[int, int, int]:
    """Return the widths of a block, of its rows and of its mismatched pairs, and its pixels."""
    own = max(prompt + answer for prompt, answer, _ in block)
    mismatched = max(prompt + block[place - 1][1] for place, (prompt, _, _) in enumerate(block))
    return own, mismatched, sum(pixels for _, _, pixels in block)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("seed", range(20))
def test_no_block_is_larger_in_any_way_than_one_of_those_that_are_traced(seed: int, loss_type: str) -> None:
    of = np.random.default_rng(seed)
    count, trained, evaluated = (int(of.integers(*limits)) for limits in ((8, 40), (2, 6), (1, 6)))
    rows, exchanges = drawn_answers(seed, count), loss_type == "kto"
    sizes = {"per_device_train_batch_size": trained, "per_device_eval_batch_size": evaluated}
    others = {"gradient_accumulation_steps": 1, "max_length": None, "eval_strategy": "epoch", "loss_type": loss_type}
    geometry = whole_geometry(find_trainer("kto"), TrainingPlan("kto", {**sizes, **others}, {}), of_answers(rows))
    assert geometry.evaluation is not None

    def needs(places: Sequence[int]) -> tuple[int, int, int]:
        own, mismatched, pixels = answered_load([rows[place] for place in places])
        return len(places) * own, len(places) * mismatched * exchanges, pixels

    for found, size in ((geometry, trained), (geometry.evaluation, evaluated)):
        every = {tuple(range(start, min(start + size, count))) for start in range(0, count, size)}
        # A last block with fewer rows repeats them.
        blocks = [tuple(dict.fromkeys(shape.chosen)) for shape in found.shapes]
        assert set(blocks) <= every
        assert all(len(shape.chosen) == size and shape.evaluated is (found is not geometry) for shape in found.shapes)
        for shape, block in zip(found.shapes, blocks, strict=True):
            assert (len(block) * shape.tokens, len(block) * shape.second_tokens) == needs(block)[:2]
        for block in every:
            assert any(all(np.greater_equal(needs(shape.chosen), needs(block))) for shape in found.shapes)


def test_typical_micro_batches_of_blocks_are_blocks_with_the_mean_sizes_of_all() -> None:
    rows = drawn_answers(3, 802)
    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_length": None}
    sizes = whole_geometry(find_trainer("kto"), TrainingPlan("kto", args, {}), of_answers(rows)).sizes
    blocks = [rows[start : start + 4] for start in range(0, 800, 4)]
    chosen = [[rows[place] for place in size.shape.chosen] for size in sizes]
    assert all(block in blocks for block in chosen)
    stand_in = sum(size.share * np.array(answered_load(block)) for size, block in zip(sizes, chosen, strict=True))
    assert stand_in == pytest.approx(np.mean([answered_load(block) for block in blocks], axis=0), rel=0.1)


def test_typical_micro_batches_of_a_generation_have_the_mean_image_data_of_it() -> None:
    args = {"num_generations": 2, "max_completion_length": 16, "steps_per_generation": 4}
    plan = TrainingPlan("grpo", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **args}, {})
    plan = replace(plan, completions=Completions(8.0, 8.0))
    for size in whole_geometry(find_trainer("grpo"), plan, of_rows(*ROWS)).sizes:
        pixels = [ROWS[row][1] for row in size.shape.chosen]
        from_mean = [abs(one - sum(pixels) / len(pixels)) for one in pixels]
        assert len(pixels) == 4
        assert from_mean[0] == min(from_mean)


def test_prompts_to_evaluate_on_are_there_once_for_each_completion() -> None:
    of = of_rows(*ROWS)
    of = replace(of, evaluation=of_rows((10, 0), (12, 100), (11, 50)).dataset)
    args = {"num_generations": 2, "num_generations_eval": 4, "max_completion_length": 16, "eval_strategy": "epoch"}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1}
    plan = replace(TrainingPlan("grpo", {**sizes, **args}, {}), completions=Completions(8.0, 8.0))
    found = whole_geometry(find_trainer("grpo"), plan, of).evaluation
    assert found is not None
    assert found.worst.evaluated
    assert found.worst.chosen == (1, 1, 1, 1, 2, 2, 2, 2)
    traced = find_trainer("grpo").traced_plan(plan, found.layout, found.worst)
    # The rows of a trace are drawn twice each, and every other one is evaluated on.
    assert (traced.args["num_generations"], traced.args["steps_per_generation"]) == (2, 2)


@pytest.mark.parametrize(("trainer", "refuses"), [("grpo", True), ("rloo", False)])
def test_prompts_with_and_without_images_are_not_completed_together_where_trl_takes_images_of_all_alone(
    trainer: str, refuses: bool
) -> None:
    mixed, known = LengthDistribution({0: 1, 1: 2}), find_trainer(trainer)
    of = of_rows((10, 0), (12, 100), (11, 50))
    assert of.dataset.images is not None
    of = replace(of, dataset=replace(of.dataset, images=replace(of.dataset.images, in_row=mixed)))
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
    alone = TrainingPlan(trainer, args, completions=Completions(8.0, 8.0))
    two = replace(alone, args={**args, "gradient_accumulation_steps": 2})
    assert known.refused(alone, of) is None
    assert ("1 prompt of 3 has none" in str(known.refused(two, of))) is refuses
    evaluated = {"eval_strategy": "epoch", "num_generations_eval": 1, "per_device_eval_batch_size": 2}
    three = replace(alone, args={**args, **evaluated})
    assert known.refused(three, replace(of, evaluation=None)) is None
    assert ("1 prompt of 3 has none" in str(known.refused(three, replace(of, evaluation=of.dataset)))) is refuses


def test_shapes_have_the_tokens_of_their_rows() -> None:
    for shape in geometry_of(of_rows(*ROWS), 3).shapes:
        tokens = [ROWS[row][0] for row in shape.chosen]
        assert shape.tokens == max(tokens)
        assert shape.filled == pytest.approx(sum(tokens) / (3 * max(tokens)))
    assert geometry_of(of_rows(*ROWS), 2, pad_to_multiple_of=64).worst.tokens == 128


def test_rows_that_are_cut_are_chosen_by_what_is_left_of_them() -> None:
    found = geometry_of(of_rows((90, 0), (80, 5000), (70, 100)), 1, max_length=60)
    # All are of one width, so that the one with the most image data stands for all.
    assert (found.worst.tokens, max(shape.tokens for shape in found.shapes)) == (60, 60)
    assert (1,) in [shape.chosen for shape in found.shapes]
    summary = RowSummary(*(np.array(sizes) for sizes in ([90, 40], [70, 40], [50, 30]))).cut_to(60)
    assert [sizes.tolist() for sizes in (summary.widest, summary.shortest, summary.trainable)] == [
        [60, 40],
        [60, 40],
        [20, 30],
    ]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_few_micro_batches_have_the_mean_width_and_pixels_of_all(rows: int) -> None:
    drawn = np.random.default_rng(1)
    tokens, images = drawn.integers(20, 400, 40).tolist(), drawn.integers(0, 5, 40).tolist()
    many = [(length, 3000 * count) for length, count in zip(tokens, images, strict=True)]
    sizes = geometry_of(of_rows(*many), rows).sizes
    assert sum(size.share for size in sizes) == pytest.approx(1)
    by_width = sorted(tokens)
    expected = sum(width * comb(place, rows - 1) for place, width in enumerate(by_width)) / comb(len(many), rows)
    assert sum(size.share * size.shape.tokens for size in sizes) == pytest.approx(expected, rel=0.1)
    pixels = [sum(many[row][1] for row in size.shape.chosen) for size in sizes]
    mean = rows * sum(elements for _, elements in many) / len(many)
    assert sum(size.share * of for size, of in zip(sizes, pixels, strict=True)) == pytest.approx(mean, rel=0.15)


def test_rows_of_equal_sizes_make_a_single_micro_batch() -> None:
    found = geometry_of(of_rows(*[(50, 3000)] * 20), 4)
    assert found.rivals == ()
    (size,) = found.sizes
    assert (size.share, size.shape.chosen) == (pytest.approx(1), (0,) * 4)


@pytest.mark.parametrize(("rows", "unpadded"), [(1, (0, 1)), (2, None)])
def test_the_widest_prompt_is_not_padded_in_a_micro_batch_of_its_own(
    rows: int, unpadded: tuple[int, ...] | None
) -> None:
    """TRL pads all prompts of a generation to the widest, which has no padding itself, and then no mask."""
    args = {"num_generations": 2, "max_completion_length": 16, "steps_per_generation": 4 // rows}
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 4 // rows}
    plan = replace(TrainingPlan("grpo", {**sizes, **args}, {}), completions=Completions(8.0, 8.0))
    known, of = find_trainer("grpo"), of_rows(*ROWS[:5])
    found = otherwise_padded(known, plan, of, whole_geometry(known, plan, of), unmasked=True)
    assert (found and found.worst.chosen) == unpadded


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_the_image_data_of_few_prompts_to_evaluate_on_is_their_mean(prompts: int) -> None:
    """TRL evaluates each prompt once with each of its completions."""
    rows = [(10, 1000), (10, 3000), (10, 2000)][:prompts]
    of = of_rows(*ROWS)
    of = replace(of, evaluation=of_rows(*rows).dataset)
    args = {"num_generations": 2, "max_completion_length": 4, "eval_strategy": "epoch"}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 1}
    plan = replace(TrainingPlan("grpo", {**sizes, **args}, {}), completions=Completions(4.0, 4.0))
    found = whole_geometry(find_trainer("grpo"), plan, of).evaluation
    assert found is not None
    stand_in = sum(size.share * rows[size.shape.chosen[0]][1] for size in found.sizes)
    assert stand_in == pytest.approx(sum(pixels for _, pixels in rows) / prompts)


def test_rows_to_evaluate_on_are_chosen_among_their_own() -> None:
    of = of_rows(*ROWS)
    of = replace(of, evaluation=of_rows((10, 0), (12, 100)).dataset)
    found = geometry_of(of, 2, eval_strategy="epoch", per_device_eval_batch_size=2).evaluation
    assert found is not None
    assert found.worst.evaluated
    assert sorted(found.worst.chosen) == [0, 1]
