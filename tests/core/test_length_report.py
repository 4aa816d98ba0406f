"""The report on lengths counts every row and token once, and its limits add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autotune.core.codec import decode, encode
from autotune.core.length_report import MOST_BINS, LengthReport, length_report
from autotune.core.lengths import LengthDistribution
from tests.reporting.examples import a_workload


def a_report(counts: dict[int, int]) -> LengthReport:
    """Return the report on a dataset with so many rows of each length."""
    workload = a_workload()
    return length_report(replace(workload, dataset=replace(workload.dataset, lengths=LengthDistribution(counts))))


CASES = pytest.mark.parametrize(
    "counts", [{1: 1}, {7: 3}, {1: 5, 2: 1, 100_000: 1}, dict.fromkeys(range(1, 500), 1), {300: 2, 310: 9}]
)


@CASES
def test_the_histogram_holds_every_row_and_token_once(counts: dict[int, int]) -> None:
    report = a_report(counts)
    assert sum(bin_.rows for bin_ in report.histogram) == report.rows == sum(counts.values())
    assert sum(bin_.tokens for bin_ in report.histogram) == report.tokens


@CASES
def test_the_bins_follow_on_each_other_from_the_shortest_row_to_the_longest(counts: dict[int, int]) -> None:
    bins = a_report(counts).histogram
    assert (bins[0].low, bins[-1].high) == (min(counts), max(counts))
    assert all(left.high + 1 == right.low for left, right in pairwise(bins))
    assert len(bins) <= MOST_BINS


@CASES
def test_the_last_limit_cuts_nothing_and_each_longer_one_keeps_more(counts: dict[int, int]) -> None:
    limits = a_report(counts).limits
    assert (limits[-1].max_length, limits[-1].coverage, limits[-1].rows_cut) == (max(counts), 1.0, 0)
    assert all(left.coverage <= right.coverage and left.rows_cut >= right.rows_cut for left, right in pairwise(limits))


def test_a_limit_counts_the_rows_it_cuts_and_the_tokens_it_drops() -> None:
    limits = {limit.max_length: limit for limit in a_report({100: 2, 200: 1, 400: 1}).limits}
    assert (limits[128].rows_cut, limits[128].tokens_dropped) == (2, 72 + 272)
    assert limits[128].coverage == pytest.approx(1 - 344 / 800)


def test_quantiles_are_lengths_that_rows_have() -> None:
    quantiles = {item.share: item.tokens for item in a_report({10: 90, 50: 9, 1000: 1}).quantiles}
    assert (quantiles[0.0], quantiles[0.5], quantiles[0.95], quantiles[0.99], quantiles[1.0]) == (10, 10, 50, 50, 1000)


def test_the_report_survives_json() -> None:
    report = a_report({10: 90, 50: 9})
    assert decode(LengthReport, encode(report)) == report
