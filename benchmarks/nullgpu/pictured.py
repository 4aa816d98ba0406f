"""Small vision-language models with transformers' own processors, and rows with images for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.nullgpu.models import PICTURED, PICTURED_ROWS
from tests.step.test_images_tokenised import of_answers, of_pairs, of_prompts, rows_of
from tests.vision import picture, write_small_vision_model

_LAYERS = 6
_LANGUAGE: Mapping[str, Any] = {
    "hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 8,
}  # fmt: skip
_FORMATS: Mapping[str, Callable[[list[list[Any]]], Any]] = {
    "sft": rows_of, "dpo": of_pairs, "kto": of_answers, "grpo": of_prompts, "rloo": of_prompts,
}  # fmt: skip


def write_pictured(model: str, trainer: str, folder: Path) -> tuple[Path, Path]:
    """Write a model and rows of one to three images, in the trainer's format, and return their places."""
    family = PICTURED[model]
    directory = write_small_vision_model(folder / "model", family, weights=False, layers=_LAYERS, language=_LANGUAGE)
    images = [[picture(90 + number, 60)] * (1 + number % 3) for number in range(PICTURED_ROWS)]
    file = folder / "rows.parquet"
    _FORMATS[trainer](images).to_parquet(str(file))
    return directory, file
