"""Writes rows of a given number of tokens in any trainer's format: random tokens, or one repeated letter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shapes import LETTER, write_rows

Row = Mapping[str, Any]


def write_rows_of(
    trainer: str, file: Path, lengths: Iterable[int], vocabulary: int, prompts: Mapping[int, int] | None = None
) -> Path:
    """Write a row for each length, and return the file.

    Args:
        trainer: name of the trainer whose format they have.
        lengths: tokens of each row: of a prompt, where the trainer generates the completions; of a prompt and an
            answer, each of half of them, where it learns from answers; else of the whole row.
        prompts: for SFT, by the length of a row, the tokens of its prompt, which the loss leaves out.
    """
    if prompts:
        row: Callable[[int, int], Row] = partial(_answered, prompts)
    elif trainer in _FORMATS:
        row = _FORMATS[trainer]
    else:
        return write_rows(file, lengths, vocabulary)
    with file.open("w", encoding="utf-8") as lines:
        for number, length in enumerate(lengths):
            lines.write(json.dumps(row(length, number)) + "\n")
    return file


def _answered(prompts: Mapping[int, int], length: int, _number: int) -> Row:
    return {"prompt": _text(prompts[length]), "completion": _text(length - prompts[length] - 1)}


def _prompts(length: int, _number: int) -> Row:
    return {"prompt": _text(length)}


def _pairs(length: int, _number: int) -> Row:
    # TRL adds the end-of-sequence token to answers.
    prompt, answer = _text(length // 2), _text(length - length // 2 - 1)
    return {"prompt": prompt, "chosen": answer, "rejected": answer}


def _labelled(length: int, number: int) -> Row:
    return {
        "prompt": _text(length // 2), "completion": _text(length - length // 2 - 1), "label": number % 2 == 0
    }  # fmt: skip


def _text(count: int) -> str:
    return LETTER * count


_FORMATS: Mapping[str, Callable[[int, int], Row]] = {
    "dpo": _pairs,
    "kto": _labelled,
    "reward": _pairs,
    "grpo": _prompts,
    "rloo": _prompts,
    "online_dpo": _prompts,
    "distillation": _prompts,
}
