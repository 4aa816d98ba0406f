"""A maximum length beyond the longest row still cuts KTO's mismatched pairs, which are wider than any row."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.plan import TrainingPlan
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import prepare
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


@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_any_rows_may_share_a_micro_batch_where_trl_splits_some_off(
    rows: int, small_model_directory: Path, tmp_path: Path
) -> None:
    words = [(30, 30), (30, 30), (1, 1), (9, 9), (40, 1), (1, 45), (60, 1), (60, 1)]
    given = [{"prompt": "1 " * prompt, "completion": " 2" * answer, "label": True} for prompt, answer in words]
    drawn, source = [], random.Random(1)
    for seed in range(12):
        found = prepared_rows(KTO, source.sample(given, len(given)), small_model_directory, tmp_path / str(seed))
        plan = found.plan({"per_device_train_batch_size": rows})
        for batch in found.built(plan, tmp_path / f"built{seed}").get_train_dataloader():
            widths = batch["KL_input_ids"].size(1), batch["input_ids"].size(1)
            drawn.append((*widths, int(batch["completion_mask"].sum())))
    asked = replace(found.asked, dataset=replace(found.asked.dataset, test_size=0.2))
    of = prepare(asked, JobContext(tmp_path, time.monotonic()))
    said = KTO.geometry(plan, of.dataset.documents)
    second_tokens, widest, counted = map(max, zip(*drawn, strict=True))
    assert max(shape.second_tokens for shape in said.shapes) >= second_tokens
    assert max(shape.tokens for shape in said.shapes) == widest
    trained = (shape.rows * shape.tokens * shape.filled * shape.trained for shape in said.shapes)
    assert max(trained) >= 0.97 * counted
    assert said.rows == len(given)


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
