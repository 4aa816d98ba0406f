"""What a maximum length keeps of a dataset."""

from __future__ import annotations

import pytest

from autotune.core.lengths import LengthDistribution

LENGTHS = LengthDistribution({10: 3, 100: 1})


def test_counts_add_up() -> None:
    assert (LENGTHS.rows, LENGTHS.tokens, LENGTHS.longest) == (4, 130, 100)


def test_coverage_is_the_share_of_tokens_that_is_kept() -> None:
    assert LENGTHS.coverage(10) == 40 / 130
    assert LENGTHS.coverage(5) == 20 / 130
    assert LENGTHS.coverage(None) == LENGTHS.coverage(1000) == 1.0


@pytest.mark.parametrize("coverage", [0.1, 0.5, 0.9, 0.99, 1.0])
def test_the_shortest_covering_length_covers_and_one_token_less_does_not(coverage: float) -> None:
    shortest = LENGTHS.shortest_covering(coverage)
    assert LENGTHS.coverage(shortest) >= coverage
    assert shortest == 1 or LENGTHS.coverage(shortest - 1) < coverage


def test_a_quantile_is_a_length_that_so_many_rows_do_not_exceed() -> None:
    assert (LENGTHS.quantile(0.5), LENGTHS.quantile(0.75), LENGTHS.quantile(0.76)) == (10, 10, 100)


def test_rows_over_a_length_are_counted() -> None:
    assert (LENGTHS.rows_over(9), LENGTHS.rows_over(10), LENGTHS.rows_over(100)) == (4, 1, 0)
