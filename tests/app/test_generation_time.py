"""The time to generate completions of typical length is derived from traces of other lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

import autotune
from autotune.core.candidate import Choice
from tests.small import write_rows, write_small_model

ONE_WAY: dict[str, Choice] = {
    "attention": "sdpa", "gradient_checkpointing": "off", "liger": "off", "hub_kernels": "off",
    "precision": "float32", "optimizer": "adamw_torch", "pad_to_multiple_of": "none", "vllm": "off",
    "allocator": "default", "steps_per_generation": "step", "per_device_train_batch_size": 8, "beta": "0.0",
    "num_generations": 2, "num_iterations": 1,
}  # fmt: skip
pytestmark = pytest.mark.slow


def generating_seconds(model: str, rows: str, most: int, typical: int) -> float:
    """Return the planned time of generating completions of a typical and a largest length."""
    fix = {**ONE_WAY, "max_completion_length": most}
    plan = autotune.plan(model, rows, trainer="grpo", gpu="H200", fix=fix, completion_length=typical, explain=True)
    assert plan.explanation is not None
    (found,) = [time.seconds for time in plan.explanation.times if time.part.phase == "generation"]
    return found


@pytest.mark.nightly
def test_it_is_what_traces_of_that_very_length_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(write_small_model(tmp_path / "model", weights=False, num_hidden_layers=4))
    prompts = ({"prompt": " ".join(["memory"] * (5 + place % 11))} for place in range(64))
    rows = str(write_rows(tmp_path / "rows.jsonl", prompts))
    exact = generating_seconds(model, rows, 48, 48)
    assert generating_seconds(model, rows, 96, 48) == pytest.approx(exact, rel=0.01)
    # Each token takes its time.
    assert generating_seconds(model, rows, 96, 24) == pytest.approx(exact / 2, rel=0.03)
