"""Builds TRL's objects from a training plan as TRL's scripts do; users call it through the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from accelerate import ParallelismConfig
from accelerate.utils import TorchContextParallelConfig
from datasets import Dataset, load_dataset
from peft import PeftConfig
from transformers import BitsAndBytesConfig
from trl import ModelConfig, get_peft_config, get_quantization_config

from autotune.core.plan import TrainingPlan
from autotune.core.workload import ModelSource
from autotune.step.models.peft import peft_from_json
from autotune.step.trainers import adapter
from autotune.trainers.distillation import TEACHER, TEACHER_LOADING, TEACHER_REVISION


def config(plan: TrainingPlan, **overrides: object) -> Any:
    """Return the trainer's configuration, such as a ``trl.DPOConfig``; ``overrides`` win over the plan's ``args``."""
    # transformers modifies the mappings that it gets (TrainingArguments._process_fsdp_args).
    args = {name: deepcopy(value) if isinstance(value, dict) else value for name, value in plan.args.items()}
    if plan.parallelism:
        args["parallelism_config"] = parallelism_config(plan.parallelism)
    loading = {"model_init_kwargs": model_init_kwargs(plan)}
    if TEACHER in plan.args:
        loading[TEACHER_LOADING] = teacher_init_kwargs(plan)
    return adapter(plan.trainer).config(**{**args, **loading, **overrides})


def parallelism_config(given: Mapping[str, Any]) -> ParallelismConfig:
    """Return accelerate's `ParallelismConfig`; `cp_comm_strategy` is a field of its context parallelism handler."""
    sizes = dict(given)
    exchange = sizes.pop("cp_comm_strategy", None)
    handler = TorchContextParallelConfig(cp_comm_strategy=exchange) if exchange else None
    return ParallelismConfig(**sizes, cp_handler=handler)


def model_arguments(plan: TrainingPlan) -> ModelConfig:
    """Return TRL's model arguments."""
    return ModelConfig(**plan.model)


def model_init_kwargs(plan: TrainingPlan) -> dict[str, Any]:
    """Return the keyword arguments with which a model is loaded, composed as in ``trl/scripts/``."""
    return _init_kwargs(plan, model_arguments(plan).model_revision, "model_init_kwargs")


def teacher_init_kwargs(plan: TrainingPlan) -> dict[str, Any]:
    """Return the keyword arguments with which a teacher is loaded, composed as in ``trl/scripts/distillation.py``.

    Dtype and attention default to the trained model's; quantisation does not.
    """
    return _init_kwargs(plan, plan.args.get(TEACHER_REVISION), TEACHER_LOADING)


def _init_kwargs(plan: TrainingPlan, revision: object, field: str) -> dict[str, Any]:
    """Return TRL's arguments of ``from_pretrained``, with the plan's additions in the given field of ``args``."""
    arguments, own = model_arguments(plan), plan.args.get(field)
    return {
        "revision": revision,
        "attn_implementation": arguments.attn_implementation,
        "dtype": arguments.dtype,
        **(own if isinstance(own, dict) else {}),
        "trust_remote_code": False,
    }


def model_makers(
    plan: TrainingPlan,
    source: ModelSource,
    kwargs: Mapping[str, Any],
    load: Callable[[ModelSource, Mapping[str, Any], BitsAndBytesConfig | None], Any],
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return factories of the plan's model and of a further model: the teacher, or another copy of the model.

    Args:
        kwargs: keyword arguments of ``from_pretrained`` for the model, as :func:`model_init_kwargs` returns them.
        load: loads a model, given its source, those arguments, and its quantisation or None.
    """

    def make_model() -> Any:
        return load(source, kwargs, quantization_config(plan))

    if TEACHER not in plan.args:
        return make_model, make_model
    own = teacher_init_kwargs(plan)
    revision, quantization = own.pop("revision"), own.pop("quantization_config", None)
    found = BitsAndBytesConfig.from_dict(quantization) if isinstance(quantization, dict) else quantization
    teacher = ModelSource(str(plan.args[TEACHER]), source.init, str(revision or "main"))
    return make_model, partial(load, teacher, own, found)


def peft_config(plan: TrainingPlan) -> PeftConfig | None:
    """Return the PEFT configuration, or None when all weights are trained.

    Raises:
        InputError: PEFT does not accept it.
    """
    if plan.peft:
        return peft_from_json(plan.peft)
    return get_peft_config(model_arguments(plan))


def quantization_config(plan: TrainingPlan) -> BitsAndBytesConfig | None:
    """Return the quantisation that the model is loaded with, or None."""
    return get_quantization_config(model_arguments(plan))


def training_dataset(path: str, split: str, data_files: str | None = None) -> Dataset:
    """Return the rows that an item of TRL's ``datasets:`` names."""
    return load_dataset(path, data_files=data_files, split=split)
