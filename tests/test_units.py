"""Sizes, durations and shares: parsed from and formatted for people."""

from __future__ import annotations

import pytest

from autotune.errors import InputError
from autotune.units import (
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    format_share,
    parse_duration,
    parse_size,
    plural,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("800MiB", 800 * 2**20),
        ("7b", 7),
        ("24", 24),
    ],
)
def test_sizes_are_read_in_both_systems(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2.5.1GiB",
        "GiB",
        "0",
        "-24",
        "-1GiB",
        "0GiB",
        "24 GiBs",
        "1e3GiB",
        "9" * 308 + "TiB",
        "9" * 400 + "GiB",
        0,
        -5,
        1 << 63,
    ],
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(InputError, match=r"is not a size.*above 0"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10m", 600), ("90s", 90), ("1h30m", 5400), ("0.5h", 1800), ("600", 600), ("1.5", 1.5), ("1 h 30 min", 5400)],
)
def test_durations_are_read(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "10x", "0", "1h30", "m", "10 minutes", "-5m", "0s", "5mm", "9" * 400, "1 30"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a duration.*above 0"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "100.0 %"),
        (0.9999999, "99.99 %"),
        (0.991, "99.10 %"),
        (0.99, "99.0 %"),
        (0.8704, "87.0 %"),
        (0.0, "0.0 %"),
    ],
)
def test_a_share_never_reads_as_all_when_it_is_not(share: float, text: str) -> None:
    assert format_share(share) == text


def test_counts_read_as_models_are_named() -> None:
    assert [format_count(count) for count in (12, 399_840, 999_700, 494_032_768, 7_615_616_512)] == [
        "12",
        "400K",
        "1.0M",
        "494M",
        "7.6B",
    ]


def test_figures_read_in_the_unit_that_suits_them() -> None:
    assert [format_bytes(count) for count in (512, 2048, 2**30 - 1, 3 * 2**29, 200 * 2**30)] == [
        "512 B",
        "2.00 KiB",
        "1.00 GiB",
        "1.50 GiB",
        "200 GiB",
    ]
    assert [format_duration(seconds) for seconds in (0.04, 0.5, 42, 185, 25920)] == [
        "40 ms",
        "0.5 s",
        "42 s",
        "3 min 05 s",
        "7 h 12 min",
    ]


@pytest.mark.parametrize(
    ("seconds", "shortest", "text"),
    [
        (185, 16, "185 s"),
        (185, 75, "3 min 05 s"),
        (25920, 185, "432 min"),
        (25920, 7200, "7 h 12 min"),
        (16, 16, "16 s"),
    ],
)
def test_compared_durations_have_one_unit(seconds: float, shortest: float, text: str) -> None:
    assert format_duration(seconds, shortest) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0843, "84.3 ms"), (0.9999, "1 s"), (1.25, "1.25 s"), (99.96, "1 min 40 s"), (1234, "20 min 34 s")],
)
def test_the_time_of_a_step_reads_in_three_digits_or_as_a_duration(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 probes"), (1, "1 probe"), (2, "2 probes"), (1024, "1,024 probes")]
)
def test_a_noun_agrees_with_its_number(number: int, words: str) -> None:
    assert plural(number, "probe") == words


def test_a_plural_that_is_no_s_is_given() -> None:
    assert [plural(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]
