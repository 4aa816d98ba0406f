"""Contract with TRL: it calls reward functions with the checked arguments, and fails on the same columns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.step.trainers import find_adapter
from autotune.step.trainers.prompts import Prompted
from autotune.trainers import find_trainer, trainers
from tests.contract.building import built
from tests.trainers.prepared import prepared_rows

SCORED = [name for name, trainer in trainers().items() if trainer.scores]
WORDS = ["memory is one", "speed is that", "the batch was all", "a length which had"]
EXTRA = {"completion": "at", "completion_ids": [5], "solution": "on", "trainer_state": "as"}
"""Columns beside the prompt, some of which TRL omits or replaces."""


def rows_with(extra: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"prompt": text, **extra} for text in WORDS]


def columns_of(name: str) -> dict[str, Any]:
    """Return the columns of :data:`EXTRA` with which TRL can train."""
    return {column: value for column, value in EXTRA.items() if (name, column) != ("online_dpo", "completion_ids")}


@pytest.mark.parametrize("name", SCORED)
def test_a_reward_function_is_passed_the_arguments_that_are_expected(
    name: str, small_model_directory: Path, tmp_path: Path
) -> None:
    calls: list[set[str]] = []

    def record(**arguments: Any) -> list[float]:
        calls.append(set(arguments))
        return [0.0] * len(arguments["completions"])

    rows, adapter = rows_with(columns_of(name)), find_adapter(name)
    trainer = built(name, small_model_directory, tmp_path, rows=rows, max_steps=1)
    trainer.reward_funcs = [record]
    trainer.train()
    assert isinstance(adapter, Prompted)
    assert calls
    assert all(call == set(adapter.reward_arguments.of(rows[0])) for call in calls)


@pytest.mark.parametrize(
    ("name", "column"),
    [*((name, column) for name in SCORED for column in ("prompts", "completions")), ("online_dpo", "completion_ids")],
)
def test_a_column_with_the_name_of_an_argument_of_trl_s_own_is_refused(
    name: str, column: str, small_model_directory: Path, tmp_path: Path
) -> None:
    rows = rows_with({column: [5]})
    with pytest.raises(TypeError, match=f"multiple values for (keyword )?argument '{column}'"):
        built(name, small_model_directory, tmp_path / "trl", rows=rows, max_steps=1).train()
    with pytest.raises(InputError, match=f"has the column {re.escape(column)}: TRL passes") as told:
        prepared_rows(find_trainer(name), rows, small_model_directory, tmp_path / "rows")
    assert told.value.hint == "Rename the column."
