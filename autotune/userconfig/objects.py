"""Reads configuration objects of TRL and PEFT."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum

from autotune.core.configuration import Configuration, read_object
from autotune.core.files.nested import mapping
from autotune.errors import InputError
from autotune.trainers import trainers
from autotune.trainers.distillation import TEACHER_LOADING
from autotune.userconfig.engine import as_launched, check_documents, with_variables
from autotune.userconfig.fields import check_understood, fields_of_kind, tables
from autotune.userconfig.launch import NO_PRECISION, Launching, launching_here

# DistillationTrainer passes None to `from_pretrained`, which then takes the type of the teacher's own configuration.
_TEACHER_DEFAULTS: Mapping[str, object] = {"dtype": None, "attn_implementation": None}


def configuration_of(config: object) -> Configuration:
    """Return the values of a configuration object, with the name of its TRL class.

    A teacher gets the type and attention with which the class loads it; ``trl distillation`` uses the trained model's.

    Raises:
        InputError: it is not a configuration of TRL.
    """
    names = [kind.__name__ for kind in type(config).__mro__]
    known = {item.config_class for item in trainers().values()} | {"LoraConfig"}
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise InputError(
            f"{names[0]} is not a supported configuration.",
            hint="Give a YAML file, the words of a command, or one of TRL's configurations, such as a trl.DPOConfig.",
        )
    kind = next((name for name in names if name in known), names[0])
    found = read_object(config, kind, lambda value: value.value if isinstance(value, Enum) else value)
    if TEACHER_LOADING not in found.values:
        return found
    loading = {**_TEACHER_DEFAULTS, **mapping(found.values[TEACHER_LOADING])}
    return dataclasses.replace(found, values={**found.values, TEACHER_LOADING: loading})


def as_started(found: Configuration, config: object) -> tuple[Configuration, Launching]:
    """Return the configuration of an object as it trains in this process, and the launch, by accelerate's variables.

    transformers determines the precision when the object is built, from accelerate's variable if ``bf16`` and ``fp16``
    are false (transformers 5.23, ``TrainingArguments.__post_init__``).

    Args:
        found: the object's values, as :func:`configuration_of` returns them.

    Raises:
        InputError, UnreadError: as in :func:`autotune.userconfig.engine.check_documents` and
            :func:`autotune.userconfig.engine.as_launched`.
    """
    launched = with_variables(launching_here(str(getattr(config, "mixed_precision", NO_PRECISION))), found)
    check_documents(launched, found)
    return as_launched(found, launched), launched


def peft_words(peft_config: object | None) -> dict[str, object]:
    """Return the fields of ``trl.ModelConfig`` that are equivalent to a PEFT configuration.

    Raises:
        InputError: it is not a LoRA configuration, or a trace does not support a setting.
    """
    if peft_config is None:
        return {}
    if type(peft_config).__name__ != "LoraConfig":
        name = type(peft_config).__name__
        raise InputError(f"A peft_config of type {name} is not supported.", hint="peft.LoraConfig is.")
    config = configuration_of(peft_config)
    check_understood(config, fields_of_kind("lora") | fields_of_kind("lora", "traced"))
    given = {word: config.values[name] for name, word in tables()["lora"]["traced"].items()}
    plain = {word: sorted(value) if isinstance(value, set | tuple) else value for word, value in given.items()}
    # Without a task type, PEFT wraps any model unchanged; trl.ModelConfig's default is that of a language model.
    words = {word: value for word, value in plain.items() if value is not None}
    targets = words.get("lora_target_modules")
    if isinstance(targets, list) and len(targets) == 1:
        # trl.ModelConfig turns a list of one into text, which PEFT takes for a regular expression on whole names.
        words["lora_target_modules"] = rf"(.*\.)?{re.escape(targets[0])}"
    return {"use_peft": True, "lora_task_type": config.values["task_type"], **words}
