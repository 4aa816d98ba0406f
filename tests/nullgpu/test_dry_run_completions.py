"""At which tokens the completions of a dry run end; transformers generates on the CPU here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autotune.nullgpu.hook.nullgpu_dry_run.completions import end_apart
from tests.small import VOCABULARY, small_config

END = 1


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Completions of three prompts of two tokens, in a process where a dry run ends them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation import GenerationMixin

    # Put back after the test.
    monkeypatch.setattr(GenerationMixin, "_get_stopping_criteria", GenerationMixin._get_stopping_criteria)
    end_apart()
    model = AutoModelForCausalLM.from_config(small_config())

    def completions(ends: int | Sequence[int] | None = END, **kwargs: Any) -> list[list[int]]:
        model.generation_config.eos_token_id = ends
        prompts = torch.full((3, 2), 7)
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), pad_token_id=0, **kwargs)
        rows: list[list[int]] = ids[:, 2:].tolist()
        return rows

    return completions


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_first_completion_has_full_length_and_the_others_are_a_token_shorter(
    generate: Any, *, do_sample: bool
) -> None:
    first, *others = generate(max_new_tokens=5, do_sample=do_sample)
    assert END not in first[:4]
    assert [row.index(END) for row in others] == [3, 3]
    assert [row[4] for row in others] == [0, 0]


def test_a_completion_does_not_end_earlier_though_the_token_that_is_drawn_ends_it(generate: Any) -> None:
    first, *others = generate(ends=list(range(1, VOCABULARY)), max_new_tokens=4)
    assert first[:3] == [0, 0, 0]
    assert [row[:2] for row in others] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("settings", [{"min_new_tokens": 5}, {"ends": None}, {"num_beams": 2}])
def test_completions_that_cannot_end_earlier_have_full_length(generate: Any, settings: dict[str, Any]) -> None:
    rows = generate(max_new_tokens=5, do_sample=False, **settings)
    assert [len(row) for row in rows] == [5, 5, 5]
    assert "num_beams" in settings or all(END not in row[:4] for row in rows)


def test_a_completion_of_one_token_is_as_long_as_the_others(generate: Any) -> None:
    assert [len(row) for row in generate(max_new_tokens=1)] == [1, 1, 1]
