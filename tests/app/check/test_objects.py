"""A configuration object is checked as transformers trains by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trl import SFTConfig

from autotune.core.documents.verdict import Need, Outcome
from tests.app.check.conftest import Checked
from tests.app.configured import sft

pytestmark = pytest.mark.slow
GPU = "H100-80GB"


@pytest.fixture
def need_of(checked: Checked, model: Path, rows: Callable[[str], Path]) -> Callable[[SFTConfig], Need]:
    def needed(config: SFTConfig) -> Need:
        verdict = checked(config=config, model=str(model), dataset=str(rows("sft")), gpu=GPU)
        assert verdict.need is not None, verdict.headline
        return verdict.need

    return needed


def test_an_object_needs_the_memory_of_the_precision_in_which_it_trains(
    need_of: Callable[[SFTConfig], Need], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, half = need_of(sft(max_length=64)), need_of(sft(max_length=64, bf16=True))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert need_of(sft(max_length=64)).bytes == half.bytes != whole.bytes


def test_a_precision_that_is_not_traced_leaves_the_need_of_an_object_open(
    checked: Checked, model: Path, rows: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    verdict = checked(config=sft(max_length=64), model=str(model), dataset=str(rows("sft")), gpu=GPU)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "mixed_precision: fp8 is not traced" in verdict.reason
