"""Results of a user's own reward function that TRL cannot read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.core.plan import TrainingPlan
from autotune.step.trainers import find_adapter
from autotune.step.trainers.prompts import RewardError


@pytest.mark.parametrize(
    ("body", "returned"),
    [
        ("return 1.0", r"1\.0"),
        ("return ['good' for _ in completions]", r"\['good'\]"),
        ("return [[1.0, 2.0]]", r"\[\[1\.0, 2\.0\]\]"),
        ("pass", "None"),
    ],
)
def test_rewards_that_trl_cannot_read_are_told_with_the_function_that_returned_them(
    body: str, returned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistaken_rewards.py").write_text(f"def judge(completions, **_):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mistaken_rewards", raising=False)
    plan = TrainingPlan("rloo", {}, rewards=("mistaken_rewards.judge",))
    (judge,) = find_adapter("rloo").arguments(plan)["reward_funcs"]
    with pytest.raises(RewardError, match=rf"mistaken_rewards.judge returned {returned}; TRL reads a list"):
        judge(completions=["a"])
