"""A maximum length beyond the longest row still cuts KTO's mismatched pairs, which are wider than any row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.plan import TrainingPlan
from autotune.techniques import find
from autotune.techniques.max_length import least_coverage
from autotune.trainers import find_trainer
from tests.trainers.prepared import Prepared, prepared_rows

KTO = find_trainer("kto")
LONG, SHORT = 40, 3
"""Words of a prompt or of an answer."""


@pytest.fixture(scope="module")
def alternating(small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Rows of a long prompt with a short answer, and of a short one with a long one, in turn."""
    words = [(LONG + row % 5, SHORT) if row % 2 else (SHORT, LONG + row % 7) for row in range(24)]
    rows = [
        {"prompt": "1 " * prompt, "completion": " 2" * answer, "label": row % 3 > 0}
        for row, (prompt, answer) in enumerate(words)
    ]
    return prepared_rows(KTO, rows, small_model_directory, tmp_path_factory.mktemp("alternating"))


def pairs(found: Prepared, plan: TrainingPlan, folder: Path) -> list[tuple[int, int]]:
    """Return the width and the tokens of each micro-batch's mismatched pairs, as TRL makes them."""
    masks = [batch["KL_attention_mask"] for batch in found.built(plan, folder).get_train_dataloader()]
    return [(mask.size(1), int(mask.sum())) for mask in masks]


@pytest.mark.parametrize("beyond", [1, 10, 1000])
def test_a_length_beyond_the_longest_row_cuts_pairs_as_trl_does(
    alternating: Prepared, tmp_path: Path, beyond: int
) -> None:
    length = alternating.workload.dataset.lengths.longest + beyond
    plan = alternating.plan({"max_length": length, "per_device_train_batch_size": 4})
    asked = replace(plan, args={**plan.args, "max_length": length})
    assert pairs(alternating, plan, tmp_path / "planned") == pairs(alternating, asked, tmp_path / "asked")


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_the_length_of_a_coverage_keeps_that_share_of_the_pairs(
    alternating: Prepared, tmp_path: Path, share: float
) -> None:
    found = replace(alternating.setting, token_coverage=share)
    length = find("max_length", KTO.techniques).parse("coverage", found)
    candidate = KTO.normal(alternating.baseline.but(max_length=length), found)
    assert KTO.illegal(candidate, found) is None
    plan = KTO.plan(candidate, found)
    kept, all_of = (
        sum(tokens for _, tokens in pairs(alternating, each, tmp_path / name))
        for name, each in {"cut": plan, "whole": replace(plan, args={**plan.args, "max_length": None})}.items()
    )
    assert kept >= share * all_of


def test_a_user_s_own_length_keeps_as_much_as_it_keeps_of_the_pairs(alternating: Prepared) -> None:
    longest = alternating.workload.dataset.lengths.longest
    own = alternating.candidate({"max_length": longest, "per_device_train_batch_size": 4})
    kept = least_coverage(own, alternating.setting)
    assert kept < 1.0
    assert KTO.illegal(own, replace(alternating.setting, token_coverage=kept)) is None


def test_a_length_that_cuts_the_pairs_of_whole_rows_is_refused(alternating: Prepared) -> None:
    longest = alternating.workload.dataset.lengths.longest
    found = replace(alternating.setting, token_coverage=0.99)
    reason = KTO.illegal(alternating.candidate({"max_length": longest}), found)
    assert reason is not None
    assert "of the mismatched pairs' tokens" in reason
