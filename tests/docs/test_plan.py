"""What ``docs/plan.md`` says of a plan's document is what the document has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from autotune.core.bundle import PlannedBundle, ServerSplit
from autotune.core.estimate import Change, Estimate, MemoryEstimate, Plan
from autotune.core.explanation import Additions, Explanation, PartPeak, PartTime, TracedPoint
from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.rent import Offer, Rent
from autotune.reporting.plan_words import BASIS

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


OF_PLANS = [Plan, PlannedBundle, ServerSplit, Estimate, MemoryEstimate, Change, Gpu, GpuSpeeds, Rent, Offer]
EXPLAINED = [Explanation, TracedPoint, PartPeak, PartTime, Additions]


@pytest.mark.parametrize("kind", [*OF_PLANS, *EXPLAINED])
def test_every_key_of_the_document_is_documented(kind: type) -> None:
    documented = set(re.findall(r"`([a-z_0-9]+)`", DOCUMENT))
    assert {field.name for field in dataclasses.fields(kind)} - documented == set()


def test_every_word_for_what_an_estimate_stands_on_is_documented() -> None:
    assert all(f"| {word} |" in DOCUMENT for word in BASIS.values())
