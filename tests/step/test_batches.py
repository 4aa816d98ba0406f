"""Which rows a probe trains on: the largest micro-batch there is, then what a random sampler would draw."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from trl import pack_dataset

from autotune.core.measurement import Schedule
from autotune.step.batches import StepSize, documents_per_row, drawn, plan_batches, worst_micro_batch
from autotune.step.rows import RowSizes, row_sizes


def sizes(tokens: list[int], trainable: list[int] | None = None, documents: list[int] | None = None) -> RowSizes:
    return RowSizes(np.array(tokens), np.array(trainable or tokens), None if documents is None else np.array(documents))


def test_the_worst_micro_batch_is_the_longest_rows() -> None:
    assert set(worst_micro_batch(sizes([3, 9, 1, 8, 8]), 2)) == {1, 3}


def test_of_rows_of_equal_length_those_with_more_trainable_tokens_are_worse() -> None:
    assert set(worst_micro_batch(sizes([8, 8, 8, 2], trainable=[1, 8, 4, 2]), 2)) == {1, 2}


def test_fewer_rows_than_a_micro_batch_are_repeated() -> None:
    assert sorted(worst_micro_batch(sizes([5, 7]), 5)) == [0, 0, 1, 1, 1]


def test_rows_are_drawn_each_once_before_any_again() -> None:
    order = drawn(5, 13, seed=1)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert list(order[:5]) != list(order[5:10])
    assert list(order) == list(drawn(5, 13, seed=1))
    assert list(order) != list(drawn(5, 13, seed=2))


def test_worst_steps_repeat_the_worst_micro_batch_and_typical_ones_follow() -> None:
    rows = sizes([1, 2, 3, 10, 9, 4, 5, 6])
    schedule = Schedule(worst_steps=2, warmup_steps=1, min_steps=1, max_steps=3)
    batches = plan_batches(rows, StepSize(rows=2, micro_batches=2), schedule, seed=0, packed_from=None)
    assert batches.order.shape == (6, 4)
    assert batches.order[:2].tolist() == [[3, 4, 3, 4]] * 2
    assert sorted(batches.order[2:4].ravel()) == list(range(8))
    assert batches.tokens.tolist() == rows.tokens[batches.order].sum(axis=1).tolist()
    assert batches.documents.tolist() == [4.0] * 6
    assert batches.population == 8


@pytest.mark.parametrize(("strategy", "whole"), [("bfd", True), ("bfd_split", False), ("wrapped", False)])
def test_all_packed_rows_together_hold_every_document(strategy: str, whole: bool) -> None:
    lengths = [5, 30, 7, 12, 90, 1, 2]
    tokens = [[1] * length for length in lengths]
    packed = pack_dataset(Dataset.from_dict({"input_ids": tokens, "labels": tokens}), 32, strategy)
    documents = documents_per_row(row_sizes(packed), packed_from=len(lengths))
    assert documents.sum() == pytest.approx(len(lengths))
    assert all(float(count).is_integer() for count in documents) is whole


def test_sizes_are_read_through_selections_and_gaps() -> None:
    rows = Dataset.from_dict(
        {"input_ids": [[1], [], [1, 2, 3], [4, 5]], "labels": [[-100], [], [-100, 2, 3], [4, -100]]}
    )
    assert row_sizes(rows).tokens.tolist() == [1, 0, 3, 2]
    assert row_sizes(rows).trainable.tolist() == [0, 0, 2, 1]
    chosen = row_sizes(rows.select([3, 2, 3]))
    assert chosen.tokens.tolist() == [2, 3, 2]
    assert chosen.trainable.tolist() == [1, 2, 1]
    assert chosen.documents is None
