"""Contract with TRL: what online DPO trains on where completions leave no room for prompts is what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.core.candidate import Candidate
from autotune.trainers import find_trainer
from tests.contract.building import built
from tests.settings import setting, workload

TOKENS = 8


def forward_of_a_step(trainer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train, and return the first pass: what the model saw, its logits, the completions and their log-probabilities."""
    seen: list[Any] = []
    forward = trainer._forward

    def noting(model: Any, prompt: Any, prompt_mask: Any, completion: Any, *args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        hook = model.register_forward_hook(lambda _, given, output: outputs.append((given[0], output.logits)))
        scores = forward(model, prompt, prompt_mask, completion, *args, **kwargs)
        hook.remove()
        seen.append((*outputs[0], completion, scores))
        return scores

    trainer._forward = noting
    trainer.train()
    return seen[0]  # type: ignore[no-any-return]  # what was noted above


@pytest.mark.parametrize("max_length", [TOKENS // 2, TOKENS])
def test_whole_completions_are_scored_without_prompts_by_logits_that_have_seen_them(
    max_length: int, small_model_directory: Path, tmp_path: Path
) -> None:
    sizes = {"max_length": max_length, "max_new_tokens": TOKENS}
    trainer = built(
        "online_dpo", small_model_directory, tmp_path, generation_kwargs={"min_new_tokens": TOKENS}, **sizes
    )
    tokens, logits, completions, scores = forward_of_a_step(trainer)
    assert tokens.tolist() == completions.tolist()
    assert completions.shape[1] == TOKENS
    unshifted = logits.log_softmax(-1).gather(2, completions.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(scores, unshifted)
    said = spoilt(**sizes)
    assert said is not None
    assert "without their prompts" in said


def test_a_prompt_that_has_room_is_scored_before_its_completion(small_model_directory: Path, tmp_path: Path) -> None:
    sizes = {"max_length": TOKENS + 1, "max_new_tokens": TOKENS}
    trainer = built(
        "online_dpo", small_model_directory, tmp_path, generation_kwargs={"min_new_tokens": TOKENS}, **sizes
    )
    tokens, logits, completions, scores = forward_of_a_step(trainer)
    assert tokens[:, 1:].tolist() == completions.tolist()
    shifted = logits[:, :-1].log_softmax(-1).gather(2, completions.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(scores, shifted)
    assert spoilt(**sizes) is None


def spoilt(**sizes: int) -> str | None:
    known, here = find_trainer("online_dpo"), setting(of=replace(workload(), trainer="online_dpo"))
    return known.unintended(Candidate({item.name: item.default(here) for item in known.techniques}).but(**sizes), here)
