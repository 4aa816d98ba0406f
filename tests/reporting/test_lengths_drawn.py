"""The report of ``autotune lengths`` on rows above a maximum length: they are cut, dropped, or both."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from autotune.core.documents.length_report import LengthReport, length_report
from autotune.core.rows.documents import Documents
from autotune.core.rows.images import ImageLimit, ImageProfile
from autotune.core.rows.lengths import LengthDistribution
from autotune.reporting.lengths import LIMITED, lengths_report
from autotune.reporting.terminal import show
from tests.reporting.examples import a_workload

CUT = Documents.of_groups([(90, 1, 100), (10, 1, 1000)])
WHOLE = Documents.of_groups([(90, 100, 100, 20), (10, 1000, 50, 1000)])
BOTH = Documents.of_groups([(90, 21, 100, 90), (10, 501, 600, 1000)])


def report_of(documents: Documents) -> LengthReport:
    """Return the report on a dataset of documents."""
    workload = a_workload()
    dataset = replace(workload.dataset, lengths=LengthDistribution(documents.widths), several=documents)
    return length_report(replace(workload, dataset=dataset))


def shown(report: LengthReport, width: int = 100) -> str:
    """Return the report in a terminal of this number of columns."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        show(lengths_report(report), console)
    return capture.get()


def test_another_split_than_that_to_train_on_is_named() -> None:
    report = report_of(CUT)
    source = replace(report.workload.dataset_source, split="test")
    other = replace(report, workload=replace(report.workload, dataset_source=source))
    assert "chats.jsonl, split test (" in shown(other)
    assert "split" not in shown(report)


def test_rows_that_are_cut_are_counted_as_such() -> None:
    text = shown(report_of(CUT))
    assert "Rows that are longer than max_length are cut." in text
    assert "rows cut" in text
    assert "rows dropped" not in text


def test_rows_that_are_dropped_whole_are_shown_as_rows_and_as_tokens() -> None:
    text = shown(report_of(WHOLE))
    assert "Rows that are longer than max_length are dropped whole; none is cut." in text
    assert "rows cut" not in text
    (line,) = (line for line in text.splitlines() if line.split()[:1] == ["128"])
    # Of 90 rows of 120 tokens and 10 of 1,050, the latter are dropped.
    assert line.split() == ["128", "50.7", "%", "10,500", "90.0", "%", "10"]


def test_rows_of_one_length_are_neither_cut_nor_dropped() -> None:
    text = shown(report_of(Documents.of_groups([(100, 120, 60, 60)])))
    assert "None of these lengths drops or cuts a row." in text


def test_a_trainer_that_does_both_says_so() -> None:
    text = shown(report_of(BOTH))
    assert "are cut, or dropped if no token would be left to train on" in text
    assert "rows cut" in text
    assert "rows dropped" in text


def test_the_tokens_of_a_pair_and_of_its_longest_sequence_are_told_apart() -> None:
    text = shown(report_of(Documents.of_groups([(1, 50, 150, 180)])))
    assert "330 in both sequences of a row on average" in text
    assert "longest sequence, at most" in text
    assert "longest sequence, at most" not in shown(report_of(CUT))


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "distillation", "online_dpo"])
def test_a_trainer_that_limits_no_rows_has_no_section_of_them(trainer: str) -> None:
    report = report_of(CUT)
    assert "max_length" in shown(report)
    assert "max_length" not in shown(replace(report, workload=replace(report.workload, trainer=trainer)))


def test_rows_with_images_have_a_section_of_their_sizes() -> None:
    assert "images in a row" not in shown(report_of(CUT))
    report = report_of(CUT)
    counts = {1: 99, 3: 1}, {5400: 90, 9000: 12}, {3072: 99, 9216: 1}, {300: 100}
    in_row, pixels, elements, ends = map(LengthDistribution, counts)
    dataset = replace(report.workload.dataset, images=ImageProfile(in_row, pixels, elements, ends))
    text = shown(replace(report, workload=replace(report.workload, dataset=dataset)))
    assert "fails if it cuts a token of an image: below a max_length of 300." in " ".join(text.split())
    lines = [line.split() for line in text.partition("images in a row")[2].splitlines()]
    assert ["median", "1", "5,400", "3,072", "12.00", "KiB"] in lines
    assert ["most", "3", "9,000", "9,216", "36.00", "KiB"] in lines


def test_lengths_that_would_cut_an_image_are_not_listed() -> None:
    report = report_of(CUT)
    one = LengthDistribution({1: 100})
    images = ImageProfile(one, one, one, LengthDistribution({300: 100}))
    pictured = length_report(replace(report.workload, dataset=replace(report.workload.dataset, images=images)))
    assert min(limit.max_length for limit in report.limits) < 300
    assert min(limit.max_length for limit in pictured.limits) == 300
    assert pictured.limits[-1] == report.limits[-1]


def test_smaller_images_are_offered_by_name_with_where_to_set_them() -> None:
    counts = LengthDistribution({1: 100})
    limits = tuple(
        ImageLimit(f"size.longest_edge={edge}", LengthDistribution(tokens), LengthDistribution(elements))
        for edge, tokens, elements in ((4096, {64: 90, 128: 10}, {768: 90, 1536: 10}), (1024, {32: 100}, {384: 100}))
    )
    images = ImageProfile(counts, counts, counts, counts)
    report = report_of(CUT)

    def of(limits: tuple[ImageLimit, ...]) -> LengthReport:
        dataset = replace(report.workload.dataset, images=replace(images, limits=limits))
        return replace(report, workload=replace(report.workload, dataset=dataset))

    text = shown(of(limits))
    lines = [line.split() for line in text.splitlines()]
    assert ["4,096", "(now)", "64", "128", "128", "100.0", "%", "1,536", "100.0", "%"] in lines
    # 3,200 of 7,040 tokens, and 38,400 of 84,480 numbers.
    assert ["1,024", "32", "32", "32", "45.5", "%", "384", "45.5", "%"] in lines
    assert LIMITED in " ".join(text.split())
    tiles = replace(limits[1], setting="do_image_splitting=false")
    large = replace(limits[0], setting="size.longest_edge=12845056")
    small = [line.split() for line in shown(of((large, tiles)), 80).splitlines()]
    assert any(line[:3] == ["12,845,056", "(now)", "64"] for line in small)
    assert any(line[:3] == ["no", "tiles", "32"] for line in small)
    assert "longest_edge" not in shown(of(()))


@pytest.mark.parametrize("documents", [CUT, WHOLE, BOTH])
def test_the_histogram_holds_the_tokens_of_all_sequences(documents: Documents) -> None:
    report = report_of(documents)
    assert sum(bin_.rows for bin_ in report.histogram) == report.rows == 100
    assert sum(bin_.tokens for bin_ in report.histogram) == report.tokens
