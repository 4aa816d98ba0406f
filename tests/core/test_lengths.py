"""The lengths of a dataset's rows, the documents that a maximum length keeps, and the report on them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autotune.core.documents.length_report import MAX_BINS, LengthReport, length_report, limit
from autotune.core.files.codec import decode, encode
from autotune.core.rows.documents import NEVER_KEPT, Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.trainers.geometry import unpacked
from tests.reporting.examples import a_workload

LENGTHS = LengthDistribution({10: 3, 100: 1})
DOCUMENTS = Documents.of_lengths(LENGTHS)
# Pairs with a prompt of 5 tokens and answers of 5 and 15; and of 50, with answers of 10 and 20.
PAIRS = Documents.of_groups([(2, 6, 10, 20), (1, 51, 60, 70)])


def test_counts_add_up() -> None:
    assert (LENGTHS.rows, LENGTHS.tokens, LENGTHS.longest) == (4, 130, 100)
    assert (DOCUMENTS.rows, DOCUMENTS.tokens, DOCUMENTS.longest) == (4, 130, 100)
    assert (PAIRS.rows, PAIRS.tokens, PAIRS.longest, PAIRS.sequences) == (3, 190, 70, 2)


def test_coverage_is_the_share_of_tokens_that_is_kept() -> None:
    assert DOCUMENTS.coverage(10) == 40 / 130
    assert DOCUMENTS.coverage(5) == 20 / 130
    assert DOCUMENTS.coverage(None) == DOCUMENTS.coverage(1000) == 1.0


def test_a_pair_whose_prompt_fills_the_length_is_dropped_whole() -> None:
    assert PAIRS.tokens_kept(50) == 60
    assert PAIRS.tokens_kept(51) == 60 + 102
    assert (limit(PAIRS, 50).rows_dropped, limit(PAIRS, 51).rows_dropped) == (1, 0)
    assert [limit(PAIRS, length).rows_cut for length in (15, 51, 70)] == [2, 1, 0]


def test_pairs_that_are_needed_whole_are_dropped_and_never_cut() -> None:
    whole = Documents.of_groups([(2, 20, 10, 20), (1, 70, 60, 70)])
    found = limit(whole, 69)
    assert (found.rows_dropped, found.rows_cut, found.row_coverage, whole.tokens_kept(69)) == (1, 0, 2 / 3, 60)
    assert (whole.rows_kept(19), whole.coverage(19)) == (0, 0.0)
    assert whole.rows_kept(70) == whole.rows_kept(None) == 3
    assert whole.shortest_covering(0.0) == 20
    assert whole.shortest_covering(0.3) == 20
    assert whole.shortest_covering(0.5) == 70


def test_a_row_that_no_length_keeps_is_left_only_where_nothing_is_dropped() -> None:
    # Rows of 10 and 30 tokens, and the longest, of 40 tokens, without one that the loss counts.
    some = Documents.of_rows([[1, 10], [21, 30], [NEVER_KEPT, 40]], ordered=False, trained=[10, 10, 0])
    assert (some.rows, some.tokens, some.longest, some.unkept) == (3, 80, 40, 1)
    for length in (40, 41, 5000):
        assert (some.rows_kept(length), some.tokens_kept(length)) == (2, 40)
        assert (some.tokens_kept(length, dropping=False), len(some.in_order(length))) == (80, 2)
        assert (some.coverage(length), some.least_coverage(length), limit(some, length).rows_dropped) == (1.0, 1.0, 1)
        assert unpacked(some, 1, length, 1).rows == 2
    assert (some.rows_kept(None), some.tokens_kept(None), some.coverage(None)) == (3, 80, 1.0)
    assert unpacked(some, 1, None, 1).worst.tokens == 40
    assert unpacked(some, 1, 40, 1).worst.tokens == 30
    assert (some.shortest_covering(1.0), some.coverage(20)) == (30, 0.25)


def test_where_rows_are_packed_nothing_is_dropped_whole() -> None:
    assert PAIRS.tokens_kept(50, dropping=False) == 60 + 100
    found = limit(PAIRS, 50, dropping=False)
    assert (found.rows_cut, found.rows_dropped, found.row_coverage) == (1, 0, 1.0)
    assert (found.coverage, found.tokens_dropped) == (160 / 190, 30)


@pytest.mark.parametrize("coverage", [0.1, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("documents", [DOCUMENTS, PAIRS], ids=["rows", "pairs"])
def test_the_shortest_covering_length_covers_and_one_token_less_does_not(documents: Documents, coverage: float) -> None:
    shortest = documents.shortest_covering(coverage)
    assert documents.coverage(shortest) >= coverage
    assert shortest == 1 or documents.coverage(shortest - 1) < coverage


def test_what_is_cut_of_a_document_is_taken_for_the_tokens_that_the_loss_counts() -> None:
    # Questions of 500 tokens with answers of 100: six tokens are 1 % of all, and 6 % of those that the loss counts.
    answered = Documents.of_rows([[501, 600]] * 10, ordered=False, trained=[100] * 10)
    assert (answered.coverage(594), answered.least_coverage(594)) == (0.99, 0.94)
    assert answered.shortest_covering(0.99) == 599
    # TRL packs a question whose answer is cut off, and drops it otherwise.
    assert answered.coverage(500, dropping=False) == 500 / 600
    assert answered.least_coverage(500, dropping=False) == answered.least_coverage(500) == 0.0
    assert answered.least_coverage(None) == answered.least_coverage(600) == 1.0


def test_of_a_document_that_is_cut_at_its_beginning_the_tokens_that_the_loss_counts_are_cut_last() -> None:
    # Questions of 500 tokens with answers of 100, the last 20 of which the loss does not count.
    answered = Documents.of_rows([[21, 600]] * 10, ordered=False, trained=[80] * 10, keeps_end=True)
    assert (answered.coverage(100), answered.least_coverage(100)) == (100 / 600, 100 / 600)
    assert answered.least_coverage(594) == answered.coverage(594) == 0.99
    assert answered.least_coverage(60) == pytest.approx(0.1)
    assert answered.shortest_covering(0.99) == 594
    # TRL packs the beginning of a document.
    assert answered.least_coverage(500, dropping=False) == 0.0
    # Answers of 100 and 400 tokens to a prompt of 50.
    pairs = Documents.of_rows([[1, 150, 450]], ordered=False, trained=[500], keeps_end=True)
    assert pairs.least_coverage(200) == pairs.coverage(200) == 350 / 600
    assert pairs.least_coverage(50) == 100 / 600


@pytest.mark.parametrize("dropping", [True, False])
@pytest.mark.parametrize("trained", [None, [20, 30]])
def test_a_maximum_length_that_no_row_reaches_is_like_none(trained: list[int] | None, dropping: bool) -> None:
    documents = Documents.of_rows([[6, 10, 20], [51, 60, 70]], ordered=False, trained=trained)
    without, above = (
        (
            documents.tokens_kept(length, dropping=dropping),
            documents.rows_kept(length),
            documents.least_coverage(length, dropping=dropping),
            documents.max_loss_tokens(length, dropping=dropping).tolist(),
            documents.in_order(length, dropping=dropping).tolist(),
            unpacked(documents, 2, length, 1),
        )
        for length in (None, 10**10)
    )
    assert above == without


def test_a_quantile_is_a_length_that_so_many_rows_do_not_exceed() -> None:
    assert (LENGTHS.quantile(0.5), LENGTHS.quantile(0.75), LENGTHS.quantile(0.76)) == (10, 10, 100)


def test_rows_that_are_cut_keep_their_number() -> None:
    cut = LengthDistribution({4: 2, 9: 1, 12: 3}).cut_to(9)
    assert cut == LengthDistribution({4: 2, 9: 4})
    assert cut.cut_to(20) == cut


def a_report(counts: dict[int, int]) -> LengthReport:
    """Return the report on a dataset with these numbers of rows by length."""
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
    assert len(bins) <= MAX_BINS


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
