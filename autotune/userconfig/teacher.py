"""Reads the teacher of a user's configuration: which model it is, and how TRL loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.core.configuration import Configuration
from autotune.core.workload import Init, ModelSource
from autotune.errors import InputError
from autotune.inspection.model import model_source
from autotune.trainers.distillation import TEACHER, TEACHER_LOADING, TEACHER_REVISION

# What DistillationTrainer loads a teacher with where nothing is set: it passes None to `from_pretrained`, which then
# takes PyTorch's default type (transformers 5.23, `_get_dtype`).
_ALONE: Mapping[str, object] = {"dtype": "float32", "attn_implementation": None}


def teacher_of(config: Configuration, init: Init = "random") -> ModelSource:
    """Return the teacher that a configuration names.

    Args:
        init: how its weights are initialised.

    Raises:
        InputError: it names none, and TRL ends without one; or it cannot be used.
    """
    named = config.values.get(TEACHER)
    if not isinstance(named, str):
        raise InputError("The configuration names no teacher.", hint=f"Write {TEACHER}.")
    revision = str(config.values.get(TEACHER_REVISION) or "main")
    return replace(model_source(named, init, tokenizes=False), revision=revision)


def without_script(config: Configuration) -> Configuration:
    """Return the values of a configuration object with the type and attention of its teacher.

    ``trl distillation`` takes those of the trained model; the class itself does not.
    """
    if TEACHER_LOADING not in config.values:
        return config
    own = config.values[TEACHER_LOADING]
    loading = {**_ALONE, **(own if isinstance(own, Mapping) else {})}
    return replace(config, values={**config.values, TEACHER_LOADING: loading})
