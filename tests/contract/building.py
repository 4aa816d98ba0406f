"""Builds each of TRL's trainers on a small model and a few rows, with any fields of its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo", "distillation")
_WORDS = ("memory is one", "speed is that", "the batch was all", "a length which had")
_PAIRS = [{"prompt": word, "chosen": f" {word}", "rejected": " it was not"} for word in _WORDS]
_ROWS: Mapping[str, list[dict[str, Any]]] = {
    "sft": [{"text": word} for word in _WORDS],
    "dpo": _PAIRS,
    "kto": [{"prompt": word, "completion": " one", "label": index % 2 == 0} for index, word in enumerate(_WORDS)],
    "reward": _PAIRS,
    "grpo": [{"prompt": word} for word in _WORDS],
    "rloo": [{"prompt": word} for word in _WORDS],
    "online_dpo": [{"prompt": word} for word in _WORDS],
    "distillation": [{"prompt": word} for word in _WORDS],
}
_OWN: Mapping[str, dict[str, Any]] = {
    "grpo": {"num_generations": 2, "max_completion_length": 4, "beta": 0.1},
    "rloo": {"num_generations": 2, "max_completion_length": 4},
    "online_dpo": {"max_new_tokens": 4},
    "distillation": {"max_completion_length": 4},
}


def config_class(name: str) -> type[Any]:
    """Return a trainer's configuration class, from the installed TRL."""
    return _class(name, "Config")


def trainer_class(name: str) -> type[Any]:
    """Return a trainer's class, from the installed TRL."""
    return _class(name, "Trainer")


def _class(name: str, kind: str) -> type[Any]:
    import trl

    if name == "online_dpo":
        from trl.experimental import online_dpo

        own: type[Any] = getattr(online_dpo, f"OnlineDPO{kind}")
        return own
    spelled = name.capitalize() if name in ("reward", "distillation") else name.upper()
    known: type[Any] = getattr(trl, f"{spelled}{kind}")
    return known


def built(
    name: str,
    model: Path,
    output: Path,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    words: Mapping[str, Any] | None = None,
    **fields: object,
) -> Any:
    """Return a trainer that would train two steps on the CPU, on a model that TRL loads.

    Args:
        rows: of the dataset, in place of four short ones.
        words: keys of ``ModelConfig``, such as those of adapters.
    """
    import trl
    from datasets import Dataset

    loaded = trl.ModelConfig(**(words or {}))
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
            **_OWN.get(name, {}),
            **fields,
        },
    )
    beside: dict[str, Any] = {"reward_funcs": _no_reward} if name in ("grpo", "rloo", "online_dpo") else {}
    if name == "distillation":
        beside["teacher_model"] = str(model)
    if name == "online_dpo":
        beside["processing_class"] = _tokenizer(model)
    if quantization := trl.get_quantization_config(loaded):
        beside["quantization_config"] = quantization
    return trainer_class(name)(
        model=str(model),
        args=config,
        train_dataset=Dataset.from_list(list(rows or _ROWS[name])),
        peft_config=trl.get_peft_config(loaded),
        **beside,
    )


def _no_reward(completions: list[Any], **_: object) -> list[float]:
    return [float(index) for index in range(len(completions))]


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, padding_side="left")
