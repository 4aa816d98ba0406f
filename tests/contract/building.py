"""Builds each of TRL's trainers on a small model and a few rows, with any fields of its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from autotune.trainers.prompts import Prompted

_WORDS = ("memory is one", "speed is that", "the batch was all", "a length which had")
_OWN: Mapping[str, dict[str, Any]] = {"grpo": {"beta": 0.1}}
"""Fields of a trainer that are not at their defaults: GRPO has no reference without one."""


def config_class(name: str) -> type[Any]:
    """Return a trainer's configuration class, from the installed TRL."""
    from autotune.step.trainers import find_adapter

    return find_adapter(name).config


def trainer_class(name: str) -> type[Any]:
    """Return a trainer's class, from the installed TRL."""
    from autotune.step.trainers import find_adapter

    return find_adapter(name).trainer


def _rows(trainer: Trainer) -> list[dict[str, Any]]:
    """Return short rows with the columns of the trainer's stand-in for data; flags are set in every second row."""
    return [
        {
            column: index % 2 == 0 if isinstance(value, bool) else _WORDS[(index + place) % len(_WORDS)]
            for place, (column, value) in enumerate(trainer.stand_in.items())
        }
        for index in range(len(_WORDS))
    ]


def _sizes(trainer: Trainer) -> dict[str, Any]:
    """Return the fields with which a trainer generates few and short completions, if it generates any."""
    sizes: dict[str, Any] = {trainer.max_completion_field: 4} if isinstance(trainer, Prompted) else {}
    return {**sizes, "num_generations": 2} if "num_generations" in trainer.fields else sizes


def built(
    name: str,
    model: Path,
    output: Path,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    words: Mapping[str, Any] | None = None,
    teacher: Path | None = None,
    **fields: object,
) -> Any:
    """Return a trainer that would train two steps on the CPU, on a model that TRL loads.

    Args:
        rows: of the dataset, in place of four short ones.
        words: keys of ``ModelConfig``, such as those of adapters.
        teacher: the model that a student imitates; None: the same one.
    """
    import trl
    from datasets import Dataset

    trainer, loaded = trainers()[name], trl.ModelConfig(**(words or {}))
    config = config_class(name)(
        str(output),
        **{
            "use_cpu": True,
            "bf16": False,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "model_init_kwargs": {"dtype": loaded.dtype, "attn_implementation": loaded.attn_implementation},
            **_sizes(trainer),
            **_OWN.get(name, {}),
            **fields,
        },
    )
    beside: dict[str, Any] = {"reward_funcs": _by_content} if trainer.scores else {}
    if trainer.has_teacher:
        beside["teacher_model"] = str(teacher or model)
    if not trainer.loads_by_name:
        beside["processing_class"] = _tokenizer(model)
    if quantization := trl.get_quantization_config(loaded):
        beside["quantization_config"] = quantization
    return trainer_class(name)(
        model=str(model),
        args=config,
        train_dataset=Dataset.from_list(list(rows or _rows(trainer))),
        peft_config=trl.get_peft_config(loaded),
        **beside,
    )


def _by_content(completions: list[Any], **_: object) -> list[float]:
    return [float(sum(map(ord, json.dumps(completion))) % 101) for completion in completions]


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, padding_side="left")
