"""The job ``build``: builds a plan's trainer and trains two steps, all virtually; returns refusals and warnings."""

from __future__ import annotations

import logging
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from linecache import getlines
from pathlib import Path
from typing import Any

import torch

from autotune.core.configuration import Built
from autotune.core.plan import TrainingPlan, allocator_settings
from autotune.core.traced import BuildRequest, TraceRequest
from autotune.errors import InputError, one_line
from autotune.step.distributed.zero import traceable_deepspeed
from autotune.step.fields import overrides
from autotune.step.job import JobContext
from autotune.step.models.loading import load_config, load_processor
from autotune.step.models.shrink import MIN_BUILT_LAYERS, first_layers
from autotune.step.objects import config
from autotune.step.run.traced_training import capability_of, traced_training, world_of
from autotune.step.run.virtual_trainer import OVERRIDDEN_IN_TRACES, TracedRows, build_virtual
from autotune.step.trainers import find_adapter
from autotune.step.trainers.prompts import reward_function
from autotune.virtual import UnsupportedError
from autotune.virtual import trace as run_virtually

# Libraries whose warnings are about the user's arguments.
_WARNING_LIBRARIES = ("trl", "transformers", "peft", "accelerate")
# Modules that read the arguments, or that get them from one that does.
_ARGUMENT_READERS = (
    "trl.", "accelerate.", "peft.", "transformers.trainer", "transformers.generation.", "transformers.optimization",
    "torch.optim.", "torch.utils.checkpoint", "bitsandbytes.optim.",
)  # fmt: skip
# Functions of a traced training that run after the trainer is built.
_TRAINING_FUNCTIONS = frozenset({"train", "_evaluate", "_rehearse_evaluation"})
_PACKAGE = Path(__file__).parents[2]


def build(request: BuildRequest, context: JobContext) -> Built:
    """Build the trainer of a plan, and train two steps with few layers and rows.

    Raises:
        InputError: the model's configuration or tokenizer cannot be used, or there is no such reward function.
    """
    # No real GPU is used.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Import them before the virtual device is in use: the imports' side effects must not be traced.
    for name in request.plan.rewards:
        reward_function(name)
    built = _build(replace(request.trained, plan=request.plan), request.further, context.folder)
    # Where vLLM is not installed, a trace stands in for it.
    if built.refused and not built.refused.startswith(ImportError.__name__):
        return built
    if request.trained.target != "cpu" and (ended := _allocator_error(request.plan.env)):
        return replace(built, ended=ended)
    error = _training_error(request.trained, request.further, context.folder)
    return built if error is None else replace(built, ended=_error_text(error), raised_at=raised_at(error))


def _allocator_error(env: Mapping[str, str]) -> str:
    """Return that PyTorch cannot parse the caching allocator's settings, which ends a training on GPUs; else empty."""
    settings = allocator_settings(env)
    # PyTorch's CUDA builds refuse to change the backend of a process.
    if "backend" in settings:
        return ""
    try:
        torch._C._accelerator_setAllocatorSettings(settings)
    except (RuntimeError, ValueError) as error:
        return f"PyTorch cannot read the caching allocator's settings {settings!r}: {str(error).splitlines()[0]}"
    return ""


def _with_arguments(further: Mapping[str, object], plan: TrainingPlan) -> TrainingPlan:
    # Only one of several processes runs here. With `dispatch_batches`, it would wait for rows that another one reads.
    absent = {"accelerator_config"} if plan.in_group else set()
    return replace(plan, args={**plan.args, **{name: further[name] for name in further.keys() - absent}})


def _build(request: TraceRequest, further: Mapping[str, object], parent: Path) -> Built:
    """Build the trainer of a plan at its own sizes."""
    adapter, plan = find_adapter(request.plan.trainer), request.plan
    model_config = first_layers(load_config(request.model, adapter.head), MIN_BUILT_LAYERS)
    processor = load_processor(request.model, adapter.processor)
    rows = TracedRows(request.worst, chosen=request.chosen)
    messages: list[str] = []
    used: dict[str, Any] = {}

    def run(device: torch.device) -> None:
        with tempfile.TemporaryDirectory(dir=parent) as folder, traceable_deepspeed(device, plan):
            # Validate the planned arguments: the trainer below has fewer micro-batches per step.
            config(plan, output_dir=folder, **OVERRIDDEN_IN_TRACES)
            explicit = _with_arguments(further, plan)
            with _collect_warnings(messages):
                trainer = build_virtual(adapter, explicit, model_config, processor, rows, device, Path(folder))
            used.update({name: getattr(trainer.args, name, None) for name in plan.args if name not in _OVERRIDDEN})

    try:
        run_virtually(run, target=request.target, capability=capability_of(request.gpu), world=world_of(plan))
    except InputError:
        raise
    except UnsupportedError:
        # The training that follows reports it.
        return Built(warnings=tuple(messages))
    except Exception as error:  # noqa: BLE001 any error of a library is its refusal of the plan
        return Built(refused=_error_text(error), warnings=tuple(messages))
    return Built(overrides=tuple(overrides(plan.args, used)), warnings=tuple(dict.fromkeys(messages)))


def _training_error(request: TraceRequest, further: Mapping[str, object], folder: Path) -> Exception | None:
    """Train two steps, evaluate as TRL does, and return the error that ended it, or None."""
    adapter, plan = find_adapter(request.plan.trainer), _with_arguments(further, request.plan)
    model_config = load_config(request.model, adapter.head)
    model_config = first_layers(model_config, request.layers or MIN_BUILT_LAYERS)
    rows = TracedRows(request.worst, request.trainable, chosen=request.chosen, again=request.compiled_again)
    processor = load_processor(request.model, adapter.processor)
    steps = traced_training(plan, model_config, processor, rows, parent=folder, rehearses=True)
    try:
        run_virtually(steps, target=request.target, capability=capability_of(request.gpu), world=world_of(plan))
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 any error may end a training
        return error
    return None


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def raised_at(error: Exception) -> str:
    """Return the lines of the two innermost frames of libraries if code that reads the arguments raised the error.

    A ``raise`` is returned alone, since the call around it has other arguments too.
    Errors at construction have none: a trace builds the trainer for other sizes than the plan's.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_training = not _TRAINING_FUNCTIONS.isdisjoint(frame.f_code.co_name for frame in frames)
    if isinstance(error, ImportError) or not (
        is_training and frames[-1].f_globals["__name__"].startswith(_ARGUMENT_READERS)
    ):
        return ""
    places = [each for each in traceback.extract_tb(error.__traceback__) if _PACKAGE not in Path(each.filename).parents]
    inner, *outer = ("".join(getlines(at.filename)[(at.lineno or 1) - 1 : at.end_lineno]) for at in places[:-3:-1])
    return (inner if inner.lstrip().startswith("raise ") else "".join((inner, *outer))).strip()


# Arguments that every trace sets itself.
_OVERRIDDEN = frozenset({*OVERRIDDEN_IN_TRACES, "gradient_accumulation_steps", "eval_strategy", "model_init_kwargs"})


@contextmanager
def _collect_warnings(messages: list[str]) -> Iterator[None]:
    """Collect the warnings of libraries, from Python's warnings and from their loggers."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(" ".join(record.getMessage().split()))

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in _WARNING_LIBRARIES]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        library_warnings = (item for item in caught if any(f"/{name}/" in item.filename for name in _WARNING_LIBRARIES))
        messages.extend(" ".join(str(item.message).split()) for item in library_warnings)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
