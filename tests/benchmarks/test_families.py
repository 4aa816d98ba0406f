"""The limits of the comparison with the CPU: every phase of every trainer, for seven families of models."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from autotune.trainers import trainers
from benchmarks.plan.families import CASES, SETUPS, Case, at_its_shape, compared, worst_of

ROOT = Path(__file__).resolve().parents[2]
MEDIAN_ERROR, WORST_ERROR = 0.005, 0.03
# What no other test in every run compares.
EVERY_RUN = {Case("opt", "kto", lora=True)}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.family}-{case.trainer}-{case.weights}",
            marks=() if case in EVERY_RUN else pytest.mark.nightly,
        )
        for case in CASES
    ],
)
def test_every_phase_is_traced_as_the_cpu_has_it(case: Case) -> None:
    phases = compared(case)
    worst = worst_of(phases)
    assert abs(worst.error) <= WORST_ERROR, f"{worst.name}: {worst.traced_bytes} for {worst.real_bytes}"
    assert median(abs(phase.error) for phase in phases) <= MEDIAN_ERROR


def test_the_documentation_names_the_trainers_that_the_results_lack() -> None:
    results, accuracy = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("benchmarks/plan/families.md", "docs/accuracy.md")
    )
    lacking = trainers().keys() - re.findall(r"^\| \w+ \| (\w+) \| (?:full|LoRA) ", results, re.MULTILINE)
    assert f"(not {', '.join(sorted(lacking))}," in " ".join(accuracy.split())


def test_every_trainer_is_compared_with_and_without_checkpointing_in_each_of_its_variants() -> None:
    assert SETUPS.keys() == trainers().keys()
    for name, setup in SETUPS.items():
        found = [(case.lora, case.checkpointing, dict(case.variant)) for case in CASES if case.trainer == name]
        ways = [(lora, on, dict(way)) for lora in (False, True) for on in (False, True) for way in setup.variants]
        assert all(way in found for way in ways), name


def test_every_case_has_a_plan_and_rows_at_its_micro_batch() -> None:
    for case in CASES:
        plan, rows = at_its_shape(case.plan)
        assert plan.trainer == case.trainer, case
        assert rows.worst, case
