"""The job ``smoke_test``: trains a tiny model with a user's arguments on the CPU; returns those that end it."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import LlamaConfig, TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from autotune.core.configuration import TRACKERS
from autotune.core.jobs.protocol import SmokeTestRequest
from autotune.core.plan import NO_EVALUATION, TrainingPlan
from autotune.errors import one_line
from autotune.step.job import JobContext
from autotune.step.models.loading import empty_tokenizer, model_class
from autotune.step.trainers import find_adapter
from autotune.trainers import find_trainer
from autotune.trainers.distillation import TEACHER
from autotune.trainers.prompts import NO_REWARD, Prompted

_STEPS = 2
_ROWS = "per_device_train_batch_size"
_ROWS_OF_ALL = (_ROWS, "per_device_eval_batch_size")
"""Rows of each process: one process trains on those of all, so that groups of completions divide them alike."""
_CAPS: Mapping[str, int] = {
    "dataloader_num_workers": 1, "max_completion_length": 8, "max_new_tokens": 8, "pad_to_multiple_of": 64,
}  # fmt: skip
"""Maximum of arguments that would only make the training longer."""
_MAX_ROWS = 1024
_CPU_OPTIMIZERS = frozenset({"adafactor", "adagrad", "adamw_torch", "adamw_torch_fused", "rmsprop", "sgd"})
_MIN_LENGTH = 16
_MIN_DATASET_ROWS, _MAX_DATASET_ROWS = 16, 1 << 16
_MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 2,
}  # fmt: skip


def smoke_test(request: SmokeTestRequest, context: JobContext) -> dict[str, str]:
    """Train with all arguments, then without those that ended a training, until one succeeds.

    Returns:
        The arguments that ended a training, each with the error that the same training without it does not have. Other
        errors are left out.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    errors: dict[str, str] = {}
    while (error := _error(request, context.folder)) is not None:
        name = _cause(request, error, context.folder)
        # It may need an argument that was left out.
        if not name or any(ended in str(error) for ended in errors):
            break
        errors[name] = f"{type(error).__name__}: {one_line(error)}"
        request = _without(request, [name])
    return errors


def _without(request: SmokeTestRequest, names: list[str]) -> SmokeTestRequest:
    return replace(request, arguments={name: value for name, value in request.arguments.items() if name not in names})


def _cause(request: SmokeTestRequest, error: Exception, folder: Path) -> str:
    """Return an argument without which the training has no error, by bisection; empty without one.

    If each of several arguments has an error, the training without the first one ends at another line. If several end
    it together, one that the error mentions is preferred.
    """
    text, arguments = str(error), request.arguments
    # PyTorch's data loader has the names without a prefix.
    named = [name for name in arguments if name.removeprefix("dataloader_") in text]
    # Zero and null come first, and switches last, with which other arguments take effect.
    others = sorted(arguments, key=lambda name: (isinstance(arguments[name], (bool, str)), bool(arguments[name])))

    def is_gone(names: list[str], *, elsewhere: bool) -> bool:
        other = _error(_without(request, names), folder)
        return other is None or (elsewhere and _place(other) != _place(error))

    for elsewhere in (False, True):
        suspects = named if named and is_gone(named, elsewhere=elsewhere) else others
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            suspects = half if is_gone(half, elsewhere=elsewhere) else suspects[len(half) :]
        if suspects and is_gone(suspects, elsewhere=elsewhere):
            return suspects[0]
    return ""


def _place(error: Exception) -> tuple[str, int | None]:
    """Return the line that raised an error; its text may have the path of a temporary folder."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return at.filename, at.lineno


def _error(request: SmokeTestRequest, parent: Path) -> Exception | None:
    """Return the error that ends a training; None if none does, or if only a package is missing."""
    try:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            _train(request, folder)
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 any error of a library is its refusal of the arguments
        return error
    return None


def _train(request: SmokeTestRequest, folder: str) -> None:
    adapter, trainer = find_adapter(request.trainer), find_trainer(request.trainer)
    args = _arguments(request, adapter.config)
    compiling = {name: args.pop(f"torch_compile_{name}", None) for name in ("backend", "mode")}
    if args.pop("torch_compile", None) or any(compiling.values()):
        # accelerate ignores the case of a backend's name (TorchDynamoPlugin).
        backend = str(compiling["backend"] or "inductor").lower()
        torch.compile(torch.nn.Identity(), backend=backend, mode=compiling["mode"])
    try:
        get_reporting_integration_callbacks(args.pop(TRACKERS, []))
    except ValueError as error:
        raise ValueError(f"{error} Write {TRACKERS}: none for no tracker.") from error
    # A spawned worker would import this process's modules for seconds.
    context = args.pop("dataloader_multiprocessing_context", None)
    DataLoader([0], num_workers=args.get("dataloader_num_workers", 0), multiprocessing_context=context)
    args |= {"output_dir": folder, "use_cpu": True, "bf16": False, "disable_tqdm": True}
    weights = request.arguments.get("reward_weights")
    rewards = len(weights) if isinstance(weights, list) and weights else int(trainer.scores)
    plan = TrainingPlan(trainer.name, {TEACHER: TEACHER} if trainer.has_teacher else {}, rewards=(NO_REWARD,) * rewards)
    config = adapter.config(**args)
    model_config = adapter.head.configured(LlamaConfig(**_MODEL), "")

    def model() -> Any:
        return model_class(model_config)(model_config)

    sizes = (getattr(config, name, None) for name in (_ROWS, "generation_batch_size"))
    count = max([_MIN_DATASET_ROWS, *(size for size in sizes if isinstance(size, int))])
    rows = Dataset.from_list([dict(trainer.stand_in)] * min(count, _MAX_DATASET_ROWS))
    # A training and its repetition without an argument begin with the same weights.
    torch.manual_seed(0)
    evaluates = request.has_evaluation_rows or config.eval_strategy != NO_EVALUATION
    with adapter.loading_models_from(model):
        adapter.trainer(
            model=model(),
            args=config,
            train_dataset=rows,
            eval_dataset=rows if evaluates else None,
            processing_class=empty_tokenizer(),
            callbacks=[_EndsEarly()],
            **adapter.arguments(plan),
        ).train()


def _arguments(request: SmokeTestRequest, config: Any) -> dict[str, Any]:
    """Return the arguments of the training; rows of all processes, at most :data:`_CAPS`."""
    trainer, known = find_trainer(request.trainer), {each.name for each in fields(config)}
    args: dict[str, Any] = {name: value for name, value in request.arguments.items() if name in known}
    if isinstance(trainer, Prompted):
        args.setdefault(trainer.max_completion_field, _CAPS[trainer.max_completion_field])
    if args.get("optim", "sgd") not in _CPU_OPTIMIZERS:
        args = {name: value for name, value in args.items() if not name.startswith("optim")}
    for name in _ROWS_OF_ALL:
        rows = args.get(name, getattr(config, name))
        if isinstance(rows, int):
            args[name] = min(rows * request.processes, _MAX_DATASET_ROWS if trainer.generates else _MAX_ROWS)
    limited = {name: value for name, value in args.items() if isinstance(value, int) and value > _CAPS.get(name, value)}
    args |= {name: _CAPS[name] for name in limited}
    length = args.get("max_length")
    # The rows are shorter than a user's.
    return {**args, "max_length": max(length, _MIN_LENGTH)} if isinstance(length, int) and length > 0 else args


class _EndsEarly(TrainerCallback):
    """Evaluates after every step, if the training evaluates, and ends it after two."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = args.eval_strategy != NO_EVALUATION
        control.should_training_stop = control.should_training_stop or state.global_step >= _STEPS
