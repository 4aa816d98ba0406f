"""Small things that are said often."""

from __future__ import annotations

import pytest

from autotune.reporting.words import bar, differences
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
