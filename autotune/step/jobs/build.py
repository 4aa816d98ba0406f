"""The job ``build``: builds a plan's trainer on the virtual device; returns refusals and warnings."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from autotune.core.configuration import Built
from autotune.core.plan import allocator_settings
from autotune.core.traced import TraceRequest
from autotune.errors import InputError, causes, one_line
from autotune.step.allocator import refused_settings
from autotune.step.distributed.zero import traceable_deepspeed
from autotune.step.job import JobContext
from autotune.step.models.loading import load_config, load_processor
from autotune.step.models.shrink import MIN_BUILT_LAYERS, first_layers
from autotune.step.objects import config
from autotune.step.run.traced_training import capability_of, world_of
from autotune.step.run.virtual_trainer import OVERRIDDEN_IN_TRACES, TracedRows, build_virtual
from autotune.step.trainers import find_adapter
from autotune.step.trainers.prompts import reward_function
from autotune.virtual import UnsupportedError
from autotune.virtual import trace as run_virtually

# Libraries whose warnings are about the user's arguments.
_WARNING_LIBRARIES = ("trl", "transformers", "peft", "accelerate")


def build(request: TraceRequest, context: JobContext) -> Built:
    """Build the trainer of a plan, at the plan's own sizes, with few layers and rows.

    Raises:
        InputError: the model's configuration or tokenizer cannot be used, there is no such reward function, or PyTorch
            cannot read the allocator's settings.
    """
    # No real GPU is used.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Import them before the virtual device is in use: the imports' side effects must not be traced.
    for name in request.plan.rewards:
        reward_function(name)
    if request.target != "cpu":
        _check_allocator(allocator_settings(request.plan.env))
    adapter, plan = find_adapter(request.plan.trainer), request.plan
    model_config = first_layers(load_config(request.model, adapter.head), MIN_BUILT_LAYERS)
    processor = load_processor(request.model, adapter.processor)
    rows = TracedRows(request.worst, chosen=request.chosen)
    messages: list[str] = []

    def run(device: torch.device) -> None:
        with tempfile.TemporaryDirectory(dir=context.folder) as folder, traceable_deepspeed(device, plan):
            # Validate the planned arguments: the trainer below has fewer micro-batches per step.
            config(plan, output_dir=folder, **OVERRIDDEN_IN_TRACES)
            with _collect_warnings(messages):
                build_virtual(adapter, plan, model_config, processor, rows, device, Path(folder))

    refused = ""
    try:
        run_virtually(run, target=request.target, capability=capability_of(request.gpu), world=world_of(plan))
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 any error of a library is its refusal of the plan
        # The trace that follows reports what no trace can follow.
        if not any(isinstance(cause, UnsupportedError) for cause in causes(error)):
            refused = f"{type(error).__name__}: {one_line(error)}"
    return Built(refused, tuple(dict.fromkeys(messages)))


def _check_allocator(settings: str) -> None:
    """Check the caching allocator's settings.

    Raises:
        InputError: PyTorch refuses them, which ends a training on GPUs.
    """
    if reason := refused_settings(settings):
        raise InputError(
            f"PyTorch cannot read the caching allocator's settings {settings!r}: {reason}",
            hint="Write NAME:VALUE with commas between, and True or False.",
        )


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
