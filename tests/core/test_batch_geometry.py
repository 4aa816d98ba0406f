"""The micro-batches that may need the most memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical
from autotune.core.rows.heaviest import RowSummary, heaviest


def worst(lengths: list[int], rows: int, *, padded: bool = True, multiple: int = 1) -> list[tuple[int, ...]]:
    """Return the lengths in the micro-batches that may need the most memory."""
    tokens = np.array(lengths)
    found = heaviest(RowSummary(tokens, tokens, tokens), rows, padded=padded, multiple=multiple)
    return [tuple(tokens[chosen].tolist()) for chosen in found]


@pytest.mark.parametrize(
    ("longest_first", "rows", "expected"),
    [
        ([9, 8, 3], 2, [(9, 8)]),
        # Equal rows have no padding, and so no attention mask; the longest shorter row brings it.
        ([8, 8, 8, 5, 2], 2, [(8, 5), (8, 8)]),
        ([8, 8, 5], 2, [(8, 5), (8, 8)]),
        # Nothing shorter, one row alone, and a row that is shorter already.
        ([8, 8, 8], 2, [(8, 8)]),
        ([8, 8, 5], 1, [(8,)]),
        ([8, 8, 5], 3, [(8, 8, 5)]),
        # Fewer rows than a micro-batch are repeated.
        ([8], 3, [(8, 8, 8)]),
        ([8, 5], 3, [(8, 5, 8)]),
    ],
)
def test_the_worst_micro_batches_are_the_longest_rows_and_those_with_padding(
    longest_first: list[int], rows: int, expected: list[tuple[int, ...]]
) -> None:
    assert worst(longest_first, rows) == expected


@pytest.mark.parametrize(
    ("longest_first", "rows", "expected"),
    [
        # 8 is a multiple of 4 and 7 is rounded up to it: padding brings the mask, even to a row by itself.
        ([8, 8, 7], 1, [(7,), (8,)]),
        ([8, 8, 4], 1, [(8,)]),
        # No row is rounded up to 8, but narrower ones have a mask.
        ([8, 4, 3, 2], 1, [(8,), (3,)]),
        # 9 is rounded up to 12, so that there is padding already.
        ([9, 9, 7], 2, [(9, 9)]),
    ],
)
def test_rounding_up_is_padding_too(longest_first: list[int], rows: int, expected: list[tuple[int, ...]]) -> None:
    assert worst(longest_first, rows, multiple=4) == expected


def test_a_row_whose_sequences_differ_is_padded_alone() -> None:
    longest, shortest = np.array([9, 8, 7, 6]), np.array([9, 8, 2, 3])
    found = heaviest(RowSummary(longest, shortest, longest), 1, padded=True, multiple=1)
    assert [longest[chosen].tolist() for chosen in found] == [[9], [7]]


def test_rows_laid_end_to_end_have_no_padding_to_look_for() -> None:
    assert worst([8, 8, 5], 2, padded=False) == [(8, 8)]


def test_ranks_wait_for_the_largest_of_the_micro_batches_that_they_run_at_once() -> None:
    sizes = (Typical(Shape(1, 300), 0.5), Typical(Shape(1, 100), 0.5))
    one = BatchGeometry(Layout.FLAT, sizes[0].shape, sizes, tokens=200.0, documents=1.0, rows=10)
    assert one.in_steps(4, 1).step_sizes == sizes
    two = one.in_steps(4, 2)
    assert [(size.shape.tokens, size.share) for size in two.step_sizes] == [(100, 0.25), (300, 0.75)]
    assert two.tokens_per_step == 2 * one.in_steps(4, 1).tokens_per_step
    # Of eight ranks, all have the smaller in four of a thousand.
    assert one.in_steps(4, 8).step_sizes == (replace(sizes[0], share=1.0),)
