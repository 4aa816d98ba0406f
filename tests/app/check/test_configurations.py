"""Configurations of every trainer get their verdicts, with every problem at once and the lines of the keys."""

from __future__ import annotations

from collections import Counter

import pytest

from autotune.core.verdict import EXIT_CODES, Outcome
from autotune.trainers import trainers
from tests.app.check.configurations import CASES, Case
from tests.app.check.conftest import Checked, Write


def test_every_trainer_has_at_least_four() -> None:
    counts = Counter(case.trainer for case in CASES)
    assert set(counts) == set(trainers())
    assert min(counts.values()) >= 4
    assert len(CASES) >= 30


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.nightly if case.nightly else ()) for case in CASES],
)
def test_a_configuration_gets_its_verdict(case: Case, write: Write, checked: Checked) -> None:
    file = write(case.trainer, case.body)
    verdict = checked(config=str(file), trainer=case.trainer, gpu=case.gpu, memory_budget=case.memory_budget)
    told = "\n".join(f"{item.line} {item.message}" for item in verdict.findings)
    assert verdict.outcome is case.outcome, f"{verdict.headline}\n{told}"
    assert verdict.exit_code == EXIT_CODES[case.outcome]
    for said, line in case.says.items():
        found = next((item for item in verdict.findings if said in item.message), None)
        assert found is not None, f"{said!r} is not in:\n{told}"
        assert found.line == (None if line is None else case.first + line)
    if case.outcome in (Outcome.FITS, Outcome.DOES_NOT_FIT):
        assert verdict.need is not None
        assert verdict.need.least_bytes < verdict.need.bytes < verdict.need.most_bytes
