"""The rows that a probe trains on: the largest micro-batch, then a random sample."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from datasets import Dataset

from autotune.core.measurement import Schedule
from autotune.step.rows import RowSizes
from autotune.step.run.batches import StepSize, plan_batches, sampler_order
from autotune.step.run.worst import worst_order
from autotune.step.trainers import find_adapter
from autotune.step.trainers.base import Collation

PADDED = Collation()
SFT = find_adapter("sft")


def sizes(tokens: list[int], trainable: list[int] | None = None) -> RowSizes:
    return RowSizes(np.array(tokens)[:, None], np.array(trainable or tokens))


def worst(rows: RowSizes, count: int, collation: Collation = PADDED) -> list[set[int]]:
    return [set(map(int, chosen)) for chosen in worst_order(rows, count, collation)]


def test_the_worst_micro_batch_is_the_longest_rows() -> None:
    assert worst(sizes([3, 9, 1, 8, 8]), 2) == [{1, 3}]


def test_of_rows_of_equal_length_those_with_more_trainable_tokens_are_worse() -> None:
    assert worst(sizes([8, 8, 8, 2], trainable=[1, 8, 4, 2]), 2) == [{1, 3}, {1, 2}]


def test_a_last_block_with_fewer_rows_is_not_the_worst_because_its_rows_are_repeated() -> None:
    assert worst(sizes([5, 5, 6], trainable=[3, 3, 5]), 2, Collation(blocks=True)) == [{0, 1}]


def test_narrower_rows_with_more_trainable_tokens_are_run_too_beside_the_widest_and_alone() -> None:
    rows = sizes([9, 9, 8, 8, 8], trainable=[1, 1, 7, 8, 6])
    assert worst(rows, 2) == [{0, 3}, {0, 1}, {2, 3}]
    assert worst(rows, 1) == [{0}, {3}]


def test_where_the_widest_rows_have_the_most_trainable_tokens_there_is_nothing_else_to_run() -> None:
    assert worst(sizes([9, 8, 8, 2], trainable=[9, 7, 6, 1]), 2) == [{0, 1}]


@pytest.mark.parametrize("seed", range(20))
def test_the_most_image_data_is_run_alone_and_beside_the_widest_row(seed: int) -> None:
    generator = np.random.default_rng(seed)
    widths, elements = generator.permutation(np.arange(10, 17)), generator.integers(0, 5, size=7) * 100
    rows = replace(sizes(widths.tolist()), image_elements=elements)
    run = worst(rows, 3)
    every = [set(chosen) for chosen in combinations(range(7), 3)]

    def most(micro_batches: list[set[int]]) -> int:
        return max(int(elements[list(chosen)].sum()) for chosen in micro_batches)

    def widest(micro_batches: list[set[int]]) -> list[set[int]]:
        return [chosen for chosen in micro_batches if int(widths.argmax()) in chosen]

    assert most(run) == most(every)
    assert most(widest(run)) == most(widest(every))


def test_of_rows_drawn_for_several_micro_batches_those_with_the_most_image_data_come_last() -> None:
    rows = replace(sizes([9, 8, 7, 6]), image_elements=np.array([5, 0, 7, 1]))
    assert [chosen.tolist() for chosen in worst_order(rows, 4, PADDED)] == [[1, 3, 0, 2]]


def test_a_shorter_row_beside_equal_ones_matters_only_where_rows_are_padded() -> None:
    rows = sizes([8, 8, 8, 2, 5])
    assert worst(rows, 2) == [{0, 4}, {0, 1}]
    assert worst(rows, 2, Collation(flat=True)) == [{0, 1}]


def test_rows_are_drawn_each_once_before_any_again() -> None:
    order = sampler_order(5, 13, seed=1)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert list(order[:5]) != list(order[5:10])
    assert list(order) == list(sampler_order(5, 13, seed=1))
    assert list(order) != list(sampler_order(5, 13, seed=2))


def test_worst_micro_batches_end_steps_and_typical_ones_follow() -> None:
    rows = sizes([1, 2, 3, 10, 9, 4, 5, 6])
    schedule = Schedule(warmup_micro_batches=2, min_micro_batches=2, max_micro_batches=4)
    batches = plan_batches(rows, StepSize(rows=2, micro_batches=2), PADDED, schedule, seed=0, packed_from=None)
    worst = [micro_batch == [3, 4] for micro_batch in batches.order.tolist()]
    assert worst[:4] == [True, False, False, True]
    assert (batches.worst, batches.worst_steps) == ((3,), 2)
    assert batches.timed.tolist() == [False] * 4 + [True] * 4
    assert batches.steps == 4
    assert batches.collated.tolist() == (2 * rows.tokens[batches.order].max(axis=1)).tolist()
    assert (batches.population, batches.mean_documents) == (8, 2.0)
    assert batches.mean_tokens == rows.tokens.mean() * 2
    packed = plan_batches(rows, StepSize(rows=2, micro_batches=2), PADDED, schedule, seed=0, packed_from=20)
    assert packed.mean_documents == 5.0


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 64])
@pytest.mark.parametrize("whole", [False, True])
def test_each_kind_of_worst_micro_batch_comes_where_gradients_and_optimizer_state_exist(
    micro_batches: int, whole: bool
) -> None:
    rows = sizes([8] * 5 + [4] * 5)
    schedule = Schedule(whole_steps=whole)
    batches = plan_batches(rows, StepSize(2, micro_batches), PADDED, schedule, seed=0, packed_from=None)
    in_step = batches.step_micro_batches
    assert [sorted(rows.tokens[batches.order[place]].tolist()) for place in batches.worst] == [[4, 8], [8, 8]]
    assert all(place >= in_step and (in_step == 1 or place % in_step) for place in batches.worst)
    assert all(place < batches.worst_steps * in_step for place in batches.worst)
    assert not batches.timed[[0, *batches.worst]].any()
    assert batches.timed[batches.worst_steps * in_step + 2 :].all()


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_a_rehearsed_step_runs_just_before_it_is_timed(micro_batches: int, whole: bool) -> None:
    rows, schedule = sizes([*range(1, 60)]), Schedule(whole_steps=whole, min_micro_batches=4, max_micro_batches=12)
    given = StepSize(2, micro_batches), PADDED, schedule
    plain = plan_batches(rows, *given, seed=0, packed_from=None)
    found = plan_batches(rows, *given, seed=0, packed_from=None, rehearse=True)
    steps = found.order.reshape(found.steps, -1).tolist()
    timed = [any(step) for step in found.timed.reshape(found.steps, -1).tolist()]
    assert sum(timed) >= 2
    assert all(steps[at] == steps[at - 1] and not timed[at - 1] for at in range(found.steps) if timed[at])
    assert found.timed.sum() >= schedule.max_micro_batches
    assert (found.worst, found.worst_steps) == (plain.worst, plain.worst_steps)


def test_micro_batches_of_one_size_are_not_rehearsed() -> None:
    rows, given = sizes([7] * 20), (StepSize(2, 2), PADDED, Schedule(max_micro_batches=8))
    plain, found = (plan_batches(rows, *given, seed=0, packed_from=None, rehearse=one) for one in (False, True))
    assert found.order.tolist() == plain.order.tolist()
    assert found.timed.tolist() == plain.timed.tolist()


@pytest.mark.parametrize("micro_batches", [1, 2, 64])
def test_a_run_for_its_time_alone_begins_with_the_worst_micro_batch_and_does_not_repeat_it(micro_batches: int) -> None:
    rows = sizes([8] * 5 + [4] * 5)
    schedule = Schedule(timing_only=True, min_micro_batches=2, max_micro_batches=6)
    batches = plan_batches(rows, StepSize(2, micro_batches), PADDED, schedule, seed=0, packed_from=None)
    assert sorted(rows.tokens[batches.order[0]].tolist()) == [4, 8]
    assert (batches.worst, batches.worst_steps, batches.is_worst.sum()) == ((), 1, 1)
    assert batches.timed[batches.step_micro_batches + schedule.warmup_micro_batches :].all()
    assert batches.timed.sum() >= schedule.max_micro_batches


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_widest_micro_batch_without_padding_is_a_worst_one_where_no_mask_may_need_more(
    micro_batches: int, blocks: bool
) -> None:
    rows, collation = sizes([9, 8, 7, 3, 6, 6, 2, 1]), Collation(blocks=blocks)
    given = StepSize(2, micro_batches), collation, Schedule()
    batches = plan_batches(rows, *given, seed=0, packed_from=None, unmasked=True)
    tokens = rows.tokens[batches.order]
    assert [tokens[place].tolist() for place in batches.worst] == [[9, 8], [6, 6]]
    assert all(place >= batches.step_micro_batches for place in batches.worst)
    # Completions, if there are any, are as long as one another where no row is to be padded.
    assert batches.longest[list(batches.worst)].tolist() == [[True, False], [True, True]]
    assert not batches.longest[~batches.is_worst].any()


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_code_that_is_compiled_twice_is_compiled_for_the_worst_micro_batch_and_the_widest_narrower_one_before_the_worst(
    micro_batches: int, whole: bool, blocks: bool
) -> None:
    rows, collation = sizes([9, 8, 7, 3, 6, 6, 2, 1]), Collation(blocks=blocks)
    given = StepSize(2, micro_batches), collation, Schedule(whole_steps=whole)
    batches = plan_batches(rows, *given, seed=0, packed_from=None, compiled=True)
    widths = rows.lengths[batches.order].max(axis=(1, 2)).tolist()
    # The two rows of 6 need no padding, of blocks and of others.
    before = [9, 7, 6] if blocks else [9, 8, 6]
    assert widths[: len(before)] == before
    assert [widths[place] for place in batches.worst] == [9]
    assert batches.worst[0] >= len(before)
    assert not batches.timed[[*range(len(before)), *batches.worst]].any()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("cut", [90, 40])
def test_a_probe_has_as_many_micro_batches_whatever_the_global_batch(rows: int, cut: int) -> None:
    lengths = sizes([min(length, cut) for length in range(10, 90)])

    def needed(micro_batches: int) -> int:
        batches = plan_batches(lengths, StepSize(rows, micro_batches), PADDED, Schedule(), seed=0, packed_from=None)
        last = int(np.flatnonzero(batches.timed.cumsum() == Schedule().min_micro_batches)[0])
        return -(-(last + 1) // batches.step_micro_batches) * batches.step_micro_batches

    assert needed(1) <= needed(8) == needed(512) <= 12
    assert needed(8) <= 1.2 * needed(1)


def test_few_typical_micro_batches_are_as_large_as_all_are_in_the_mean() -> None:
    source = np.random.default_rng(5)
    rows = sizes([int(tokens) for tokens in source.lognormal(5, 1, size=4000)])

    def spread(strata: int) -> float:
        means = []
        for seed in range(100):
            schedule = Schedule(min_micro_batches=strata, max_micro_batches=6, warmup_micro_batches=0)
            batches = plan_batches(rows, StepSize(2, 1), PADDED, schedule, seed=seed, packed_from=None)
            means.append(batches.collated[batches.timed][:6].mean() / batches.mean_collated)
        assert np.mean(means) == pytest.approx(1.0, abs=0.08)
        return float(np.std(means))

    assert spread(strata=6) < 0.6 * spread(strata=1)


def test_sizes_are_read_through_selections_and_gaps() -> None:
    rows = Dataset.from_dict(
        {"input_ids": [[1], [], [1, 2, 3], [4, 5]], "labels": [[-100], [], [-100, 2, 3], [4, -100]]}
    )
    assert SFT.lengths(rows)[:, 0].tolist() == [1, 0, 3, 2]
    assert SFT.trainable(rows).tolist() == [0, 0, 2, 1]
    chosen = rows.select([3, 2, 3])
    assert SFT.lengths(chosen)[:, 0].tolist() == [2, 3, 2]
    assert SFT.trainable(chosen).tolist() == [1, 2, 1]
