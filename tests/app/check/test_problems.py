"""A check says of a key that went whether the installed release still takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.configuration import Fault, ReadCommand
from autotune.core.verdict import Severity
from autotune.userconfig.problems import problems
from autotune.userconfig.written import written

WENT = (
    "warmup_ratio went in transformers 5.15.0: write warmup_steps: 0.1. warmup_steps below 1 is a share of all steps."
)


@pytest.mark.parametrize(
    ("read", "severity"),
    [
        (ReadCommand(), Severity.NOTE),
        (ReadCommand(faults=(Fault("warmup_ratio", "unknown", unknown=True),)), Severity.ERROR),
    ],
    ids=["an older release takes it", "the installed release has no such field"],
)
def test_a_key_that_went_is_an_error_where_the_installed_release_does_not_take_it(
    read: ReadCommand, severity: Severity, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("warmup_ratio: 0.1\n", encoding="utf-8")
    assert [(item.severity, item.message) for item in problems(written(str(file), "sft"), read)] == [(severity, WENT)]
