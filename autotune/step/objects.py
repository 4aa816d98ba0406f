"""Builds TRL's configuration objects and model arguments from a training plan, as TRL's scripts do."""

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
from autotune.step.trainers import find_adapter
from autotune.trainers.distillation import TEACHER, TEACHER_LOADING, TEACHER_REVISION


def config(plan: TrainingPlan, **overrides: object) -> Any:
    """Return the trainer's configuration, such as a ``trl.DPOConfig``; ``overrides`` replace the plan's ``args``."""
    # transformers modifies mappings among its arguments (TrainingArguments._process_fsdp_args).
    args = {name: deepcopy(value) if isinstance(value, dict) else value for name, value in plan.args.items()}
    if plan.parallelism:
        args["parallelism_config"] = parallelism_config(plan.parallelism)
    loading = {"model_init_kwargs": model_init_kwargs(plan)}
    if TEACHER in plan.args:
        loading[TEACHER_LOADING] = teacher_init_kwargs(plan)
    return find_adapter(plan.trainer).config(**{**args, **loading, **overrides})


def parallelism_config(sizes: Mapping[str, Any]) -> ParallelismConfig:
    """Return accelerate's `ParallelismConfig`; `cp_comm_strategy` is a field of its context parallelism handler."""
    remaining = dict(sizes)
    strategy = remaining.pop("cp_comm_strategy", None)
    handler = TorchContextParallelConfig(cp_comm_strategy=strategy) if strategy else None
    return ParallelismConfig(**remaining, cp_handler=handler)


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
    """Return TRL's arguments of ``from_pretrained``, updated by the field of the plan's ``args`` of that name."""
    arguments, additions = model_arguments(plan), plan.args.get(field)
    return {
        "revision": revision,
        "attn_implementation": arguments.attn_implementation,
        "dtype": arguments.dtype,
        **(additions if isinstance(additions, dict) else {}),
        "trust_remote_code": False,
    }


def model_factories(
    plan: TrainingPlan,
    source: ModelSource,
    kwargs: Mapping[str, Any],
    load: Callable[[ModelSource, Mapping[str, Any], BitsAndBytesConfig | None], Any],
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return factories of the plan's model and of a further model: the teacher, or another copy of the model.

    Args:
        kwargs: keyword arguments of ``from_pretrained`` for the model, as :func:`model_init_kwargs` returns them.
        load: loads a model from its source, those arguments, and its quantisation or None.
    """

    def make_model() -> Any:
        return load(source, kwargs, quantization_config(plan))

    if TEACHER not in plan.args:
        return make_model, make_model
    teacher_kwargs = teacher_init_kwargs(plan)
    revision, quantization = teacher_kwargs.pop("revision"), teacher_kwargs.pop("quantization_config", None)
    if isinstance(quantization, dict):
        quantization = BitsAndBytesConfig.from_dict(quantization)
    teacher = ModelSource(str(plan.args[TEACHER]), source.init, str(revision or "main"))
    return make_model, partial(load, teacher, teacher_kwargs, quantization)


def peft_config(plan: TrainingPlan) -> PeftConfig | None:
    """Return the PEFT configuration; None for full fine-tuning.

    Raises:
        InputError: PEFT does not accept it.
    """
    if plan.peft:
        return peft_from_json(plan.peft)
    return get_peft_config(model_arguments(plan))


def quantization_config(plan: TrainingPlan) -> BitsAndBytesConfig | None:
    """Return the quantisation for loading the model, or None."""
    return get_quantization_config(model_arguments(plan))


def training_dataset(path: str, split: str, data_files: str | None = None, name: str | None = None) -> Dataset:
    """Load one item of TRL's ``datasets:``."""
    return load_dataset(path, name, data_files=data_files, split=split)
