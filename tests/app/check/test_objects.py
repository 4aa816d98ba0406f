"""A configuration object is checked as transformers trains by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import SFTConfig

from autotune.core.documents.verdict import Need, Outcome
from autotune.core.program import EVALUATE
from tests.app.check.conftest import Checked

pytestmark = pytest.mark.slow
GPU = "H100-80GB"


@pytest.fixture
def need_of(checked: Checked, model: Path, rows: Callable[[str], Path]) -> Callable[[SFTConfig], Need]:
    def needed(config: SFTConfig) -> Need:
        verdict = checked(config=config, model=str(model), dataset=str(rows("sft")), gpu=GPU)
        assert verdict.need is not None, verdict.headline
        return verdict.need

    return needed


def sft(**options: Any) -> SFTConfig:
    """Return a configuration that trains in float32, unless options or variables set another precision."""
    return SFTConfig(**{"use_cpu": True, "bf16": False, "report_to": "none", "max_length": 64, **options})


def test_an_object_needs_the_memory_of_the_precision_in_which_it_trains(
    need_of: Callable[[SFTConfig], Need], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, half = need_of(sft()), need_of(sft(bf16=True))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert need_of(sft()).bytes == half.bytes != whole.bytes


def test_a_precision_that_is_not_traced_leaves_the_need_of_an_object_open(
    checked: Checked, model: Path, rows: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    verdict = checked(config=sft(), model=str(model), dataset=str(rows("sft")), gpu=GPU)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "mixed_precision: fp8 is not traced" in verdict.reason


@pytest.mark.nightly
def test_an_evaluation_before_the_first_step_is_traced(need_of: Callable[[SFTConfig], Need]) -> None:
    rows = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 48}
    assert need_of(sft(**rows)).phase != EVALUATE
    assert need_of(sft(**rows, eval_on_start=True)).phase == EVALUATE
