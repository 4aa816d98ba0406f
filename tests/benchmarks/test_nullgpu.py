"""The comparison with null GPUs: the page matches its data, which has every kind of case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.trainers import trainers
from benchmarks.nullgpu.cases import Case, cases
from benchmarks.nullgpu.models import FAMILIES, MODELS, PICTURED
from benchmarks.nullgpu.page import is_exception, page, summary
from benchmarks.nullgpu.record import Record

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "nullgpu"
EVERY = list(cases())


@pytest.fixture(scope="module")
def record() -> Record:
    return Record(FOLDER / "results.jsonl")


def test_the_page_is_that_of_the_data(record: Record) -> None:
    assert (FOLDER / "nullgpu.md").read_text(encoding="utf-8") == page(EVERY, record.rows, record.about)


def test_the_documentation_has_the_figures_of_the_data(record: Record) -> None:
    text = (FOLDER.parents[1] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert summary(EVERY, record.rows) in " ".join(text.split())


def test_the_data_has_cases_that_are_listed(record: Record) -> None:
    names = [case.name for case in EVERY]
    assert set(record.rows) <= set(names)
    assert len(set(names)) == len(names) >= 240


def test_cases_are_of_every_trainer_family_gpu_and_number_of_ranks() -> None:
    # The page has no teachers yet.
    assert {case.trainer for case in EVERY} == set(trainers()) - {"distillation"}
    assert {case.model for case in EVERY} == {*MODELS, *PICTURED} > set(FAMILIES)
    assert {case.gpu for case in EVERY} >= {"H100-80GB", "A100-80GB", "A100-40GB", "RTX4090"}
    for processes in (2, 8):
        engines = {case.choices["sharding"] for case in EVERY if case.processes == processes}
        assert engines == {"ddp", "fsdp2", "zero1", "zero2", "zero3"}
    long = Counter(case.trainer for case in EVERY if max(case.lengths) > 4000)
    assert all(long[trainer] >= 4 for trainer in ("sft", "dpo", "kto", "reward"))
    assert max(max(case.lengths) for case in EVERY) == 8192


def row(case: Case, traced: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    return {"case": case.name, "traced": dict(traced), "measured": dict(measured)}


def test_a_row_that_is_off_is_named() -> None:
    def found(allocated: int, reserved: int) -> dict[str, Any]:
        return {"allocated": allocated, "reserved": reserved, "peaks": {"micro-batch": allocated}}

    near, far, failed = EVERY[:3]
    rows = {
        near.name: row(near, found(1000, 1049), found(1000, 1000)),
        far.name: row(far, found(1000, 900), found(1000, 1000)),
        failed.name: row(failed, {"reason": "an operator"}, found(1000, 1000)),
    }
    lines = page([near, far, failed], rows, {"torch": "0"}).splitlines()

    assert not is_exception(rows[near.name])
    assert "Exceptions: 1 row (50.0%); the goal is at most 5 %, and none above 10 %." in lines
    assert f"| {far.name} | +0.00% | -10.00% |" in lines
    assert f"- {failed.name}: traced: an operator" in lines
    assert "| reserved | 2 | 7.450% | 10.00% | -10.00% | 1 % | 3 % | 5 % |" in lines
