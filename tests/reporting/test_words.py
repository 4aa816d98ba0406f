"""Small things that are said often."""

from __future__ import annotations

import pytest

from autotune.reporting.words import bar, differences, share_text
from tests.reporting.examples import BASELINE


def test_a_candidate_is_said_by_its_differences() -> None:
    assert differences(BASELINE.but(packing="bfd", max_length=64), BASELINE) == "max_length=64 packing=bfd"


def test_the_baseline_is_said_by_its_name() -> None:
    assert differences(BASELINE, BASELINE) == "TRL's default"


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "    "), (0.5, "██  "), (1.0, "████"), (0.53, "██▏ "), (7.0, "████"), (-1.0, "    ")]
)
def test_a_bar_is_as_long_as_its_share(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100.0 %"), (0.99999, "99.99 %"), (0.991, "99.10 %"), (0.8704, "87.0 %"), (0.0, "0.0 %")]
)
def test_only_the_whole_is_a_hundred_percent(share: float, text: str) -> None:
    assert share_text(share) == text
