"""The shared words and formats of reports."""

from __future__ import annotations

from autotune.reporting.words import differences
from tests.reporting.examples import BASELINE


def test_a_candidate_is_said_by_its_differences() -> None:
    assert differences(BASELINE.but(packing="bfd", max_length=64), BASELINE) == "max_length=64 packing=bfd"


def test_the_baseline_is_said_by_its_name() -> None:
    assert differences(BASELINE, BASELINE) == "TRL's default"
