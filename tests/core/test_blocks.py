"""Micro-batches that are fixed blocks of rows, and those of them that may need the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from autotune.core.rows.blocks import RECORD, blocks_of, worst_blocks


class Block(NamedTuple):
    """One block, with the fields of ``RECORD``."""

    rows: int
    tokens: int
    padded: bool
    second_tokens: int = 0
    second_padded: bool = False
    image_elements: int = 0


def of(blocks: Sequence[Block]) -> Any:
    """Return blocks that are given one by one."""
    return np.rec.fromrecords(blocks, dtype=RECORD)


def test_blocks_are_successive_rows_and_the_last_may_be_smaller() -> None:
    assert blocks_of([3, 5, 5, 5, 2], [4, 4, 6, 1, 2], 2).tolist() == [
        Block(2, 5, True, 4, False),
        Block(2, 5, False, 6, True),
        Block(1, 2, False, 2, False),
    ]
    assert blocks_of([3, 5], None, 2, multiple=4).tolist() == [Block(2, 8, True)]


def test_a_block_that_is_narrower_in_both_tensors_is_not_among_the_worst() -> None:
    found = [Block(2, 7, True, 6, True), Block(2, 9, True, 4, True), Block(2, 8, True, 7, True)]
    assert worst_blocks(of(found)) == [1, 2]


def test_padding_may_need_more_than_a_token_does() -> None:
    found = [Block(2, 9, False, 9, False), Block(2, 8, True, 9, False), Block(2, 8, False, 9, False)]
    assert worst_blocks(of(found)) == [0, 1]


def test_a_narrower_block_with_more_image_data_is_among_the_worst() -> None:
    found = blocks_of([9, 8, 3, 2, 4, 4], None, 2, image_elements=[10, 20, 0, 40, 15, 14])
    assert found["image_elements"].tolist() == [30, 40, 29]
    assert worst_blocks(found) == [0, 1]


def test_a_last_block_counts_only_where_no_other_makes_it_superfluous() -> None:
    full = Block(4, 90, True, 90, True)
    assert worst_blocks(of([full, Block(2, 100, True, 100, True)])) == [0]
    assert worst_blocks(of([full, Block(3, 110, True, 110, True)])) == [1, 0]


def test_of_equal_blocks_the_first_is_taken() -> None:
    block = Block(2, 9, True, 9, True)
    assert worst_blocks(of([Block(2, 3, True), block, block])) == [1]
