"""A few sizes represent all micro-batches, compared with every micro-batch that some rows can form."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from autotune.core.rows import representatives as module
from autotune.core.rows.batch_geometry import Shape, Typical
from autotune.core.rows.representatives import MAX_REPRESENTATIVES, distribution_of_sum

SOURCE = random.Random(3)
LONG_TAILED = [min(6000, 50 + round(SOURCE.lognormvariate(6.0, 1.0))) for _ in range(40)]
NEARLY_EQUAL = [1000 + place for place in range(40)]
TIMES: dict[str, Callable[[float], float]] = {
    "attention": lambda tokens: tokens + tokens**2 / 2000,
    "launches, then tokens": lambda tokens: max(900.0, tokens),
    "launches, then attention": lambda tokens: max(1500.0, tokens + tokens**2 / 4000),
}


def representatives(tokens: list[int], **options: Any) -> tuple[Typical, ...]:
    return module.representatives(
        tokens, lambda tokens, second_tokens=0.0: Shape(1, tokens, second_tokens=second_tokens), **options
    )


def widest(lengths: list[int], rows: int) -> list[int]:
    """Return the width of each micro-batch of rows that are drawn by chance."""
    return [max(drawn) for drawn in product(lengths, repeat=rows)]


@pytest.mark.parametrize("seconds", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_mean_time_over_few_sizes_is_that_of_all_micro_batches(
    rows: int, seconds: Callable[[float], float]
) -> None:
    every = widest(LONG_TAILED, rows)
    mean = np.mean([seconds(tokens) for tokens in every])
    found = representatives(every)
    assert len(found) <= MAX_REPRESENTATIVES
    assert sum(each.share * seconds(each.shape.tokens) for each in found) == pytest.approx(mean, rel=0.03)
    # One mean size predicts too little: time grows faster than the tokens.
    assert seconds(float(np.mean(every))) < 0.93 * mean


@pytest.mark.parametrize("seconds", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_beside_the_known_time_of_the_largest_size_two_others_are_enough(
    rows: int, seconds: Callable[[float], float]
) -> None:
    every = widest(LONG_TAILED, rows)
    known = max(every)
    found = representatives(every, prescribed=known)
    assert known in [each.shape.tokens for each in found]
    assert len(found) <= 3
    assert all(each.share > 0 for each in found)
    assert sum(each.share * each.shape.tokens for each in found) == pytest.approx(np.mean(every), rel=1e-9)
    mean = np.mean([seconds(tokens) for tokens in every])
    assert sum(each.share * seconds(each.shape.tokens) for each in found) == pytest.approx(mean, rel=0.03)


def test_a_known_size_far_above_all_others_keeps_the_mean() -> None:
    found = representatives(LONG_TAILED, prescribed=10 * max(LONG_TAILED))
    assert sum(each.share * each.shape.tokens for each in found) == pytest.approx(np.mean(LONG_TAILED), rel=1e-9)
    assert sum(each.share for each in found) == pytest.approx(1, rel=1e-9)


def test_shares_are_positive_and_keep_the_mean_size() -> None:
    for rows in (1, 2, 3):
        every = widest(LONG_TAILED, rows)
        found = representatives(every)
        assert all(each.share > 0 for each in found)
        assert sum(each.share for each in found) == pytest.approx(1, rel=1e-9)
        assert sum(each.share * each.shape.tokens for each in found) == pytest.approx(np.mean(every), rel=1e-9)
        assert all(min(every) <= each.shape.tokens <= max(every) for each in found)


def test_other_figures_of_the_micro_batches_keep_their_mean() -> None:
    drawn = list(product(LONG_TAILED, repeat=2))
    held = [sum(rows) for rows in drawn]
    found = representatives([max(rows) for rows in drawn], figures=[held])
    assert sum(each.share * each.shape.second_tokens for each in found) == pytest.approx(np.mean(held), rel=1e-9)
    # Wide micro-batches have more tokens, and none has more than its rows can hold.
    tokens = [each.shape.second_tokens for each in found]
    assert tokens == sorted(tokens)
    assert all(each.shape.second_tokens <= 2.1 * each.shape.tokens for each in found)


def test_sizes_that_hardly_differ_need_one() -> None:
    assert representatives([512] * 9) == (Typical(Shape(1, 512)),)
    assert representatives(NEARLY_EQUAL) == (Typical(Shape(1, 1020)),)


def test_a_few_sizes_are_all_taken_with_their_own_shares() -> None:
    found = representatives([100, 500, 100, 100])
    assert [each.shape.tokens for each in found] == [100, 500]
    assert [each.share for each in found] == pytest.approx([0.75, 0.25])


def test_of_two_clusters_both_are_represented() -> None:
    lengths = [*range(90, 110), *range(4900, 4910)]
    found = representatives(lengths)
    assert sum(each.share for each in found if each.shape.tokens < 1000) == pytest.approx(2 / 3, rel=0.01)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5, 6], [1] * 99 + [6000], [1, 1_000_000]])
def test_any_sizes_have_representatives(tokens: list[int]) -> None:
    found = representatives(tokens)
    assert all(each.shape.tokens >= 1 for each in found)
    if len(found) > 1:
        assert sum(each.share * each.shape.tokens for each in found) == pytest.approx(np.mean(tokens), rel=1e-9)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_sums_are_distributed_as_those_of_drawn_rows(rows: int) -> None:
    lengths = LONG_TAILED[:12]
    tokens, shares = distribution_of_sum(np.bincount(lengths), rows)
    every = [sum(drawn) for drawn in product(lengths, repeat=rows)]
    assert shares.sum() == pytest.approx(1)
    for power in (1, 2, 3):
        assert shares @ tokens.astype(float) ** power == pytest.approx(
            np.mean(np.array(every) ** float(power)), rel=2e-4
        )
