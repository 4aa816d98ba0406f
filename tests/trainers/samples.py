"""Small rows of every format of every trainer: long-tailed random texts, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from autotune.core.candidate import Choice
from tests.small import VOCABULARY, long_tailed_texts, messages_rows, prompt_completion_rows, text_rows

Rows = list[dict[str, Any]]

ROWS = 48
TEXTS = long_tailed_texts(ROWS, median_words=12, longest_words=80)


def conversations_rows(texts: Sequence[str]) -> Rows:
    """Return the texts in ShareGPT's words, which SFTTrainer takes too."""
    return [{"conversations": [{"from": "human", "value": "go on"}, {"from": "gpt", "value": text}]} for text in texts]


def token_rows(texts: Sequence[str]) -> Rows:
    """Return rows of tokens, one for each letter of the texts' first words."""
    return [{"input_ids": [3 + ord(letter) % (VOCABULARY - 3) for letter in text[:90]]} for text in texts]


def pair_rows(texts: Sequence[str]) -> Rows:
    """Return pairs of answers to a question that is part of both."""
    return [{"chosen": f"{i} ? {text}", "rejected": f"{i} ? {other}"} for i, (text, other) in enumerate(_pairs(texts))]


def prompted_pair_rows(texts: Sequence[str]) -> Rows:
    """Return pairs of answers to a question of its own; some questions are longer than the answers."""
    pairs = enumerate(_pairs(texts))
    asked = [f"{text} ?" if i % 3 == 0 else f"{i} ?" for i, text in enumerate(texts)]
    return [{"prompt": asked[i], "chosen": text, "rejected": other} for i, (text, other) in pairs]


def long_prompt_rows(texts: Sequence[str]) -> Rows:
    """Return texts as prompts of short completions, so that cutting a row may leave nothing that the loss counts."""
    return [{"prompt": f"{text} :", "completion": f" answer {i}"} for i, text in enumerate(texts)]


def prompt_rows(texts: Sequence[str]) -> Rows:
    """Return the texts as prompts, with a column that only a reward function reads."""
    return [{"prompt": text, "solution": f"{i}"} for i, text in enumerate(texts)]


def token_pair_rows(texts: Sequence[str], *, chosen: str = "chosen_ids", rejected: str = "rejected_ids") -> Rows:
    """Return pairs of tokens, under these names."""
    ids = [row["input_ids"] for row in token_rows(texts)]
    return [{chosen: one, rejected: other} for one, other in zip(ids, reversed(ids), strict=True)]


def labelled_rows(texts: Sequence[str]) -> Rows:
    """Return answers that are desirable or not; some questions are longer than the answers."""
    rows = [*prompt_completion_rows(texts[::2]), *long_prompt_rows(texts[1::2])]
    return [{**row, "label": i % 3 != 0} for i, row in enumerate(rows)]


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(texts, reversed(texts), strict=True))


SAMPLES: dict[str, Mapping[str, Callable[[Sequence[str]], Rows]]] = {
    "sft": {
        "text": text_rows,
        "messages": messages_rows,
        "prompt+completion": lambda texts: [*prompt_completion_rows(texts[::2]), *long_prompt_rows(texts[1::2])],
        "conversations": conversations_rows,
        "input_ids": token_rows,
    },
    "grpo": {"prompt": prompt_rows},
    "rloo": {"prompt": prompt_rows},
    "online_dpo": {"prompt": prompt_rows},
    "distillation": {"prompt": prompt_rows},
    "dpo": {"chosen+rejected": pair_rows, "prompt+chosen+rejected": prompted_pair_rows},
    "reward": {
        "chosen+rejected": pair_rows,
        "prompt+chosen+rejected": prompted_pair_rows,
        "chosen_ids+rejected_ids": token_pair_rows,
        "chosen_input_ids+rejected_input_ids": partial(
            token_pair_rows, chosen="chosen_input_ids", rejected="rejected_input_ids"
        ),
    },
    "kto": {
        "prompt+chosen+rejected": prompted_pair_rows,
        "chosen+rejected": pair_rows,
        "prompt+completion+label": labelled_rows,
    },
}
"""What makes rows of texts, by trainer and by the name of the format. A trainer that is added adds its own here."""


REFUSED: dict[str, Callable[[Mapping[str, Choice]], bool]] = {
    # Its KL divergence takes two rows.
    "kto": lambda choices: choices.get("per_device_train_batch_size") == 1,
    # A row holds a prompt beside its completion, of 64 tokens by default.
    "online_dpo": lambda choices: int(choices.get("max_length", 512)) <= int(choices.get("max_new_tokens", 64)),
}
"""Which choices of the suite TRL refuses with a trainer; autotune has to allow all others."""


def sample_rows(trainer: str, form: str) -> Rows:
    """Return rows of a trainer's format; without any, the test fails and names the place to add them."""
    made = SAMPLES.get(trainer, {}).get(form)
    if made is None:
        pytest.fail(f"There are no sample rows of {trainer}'s format {form!r}: add them to SAMPLES in {__name__}.")
    return made(TEXTS)
