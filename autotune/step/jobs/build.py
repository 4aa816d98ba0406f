"""The job ``build``: builds a plan's trainer on the virtual device; returns refusals and warnings."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from autotune.core.configuration import Built
from autotune.core.jobs.traced import TraceRequest
from autotune.core.plan import allocator_settings
from autotune.errors import InputError, causes, first_line, one_line
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
_HEADER = "include/c10/cuda/CUDAAllocatorConfig.h"
_SETTING = re.compile(r"[^,\[\]]+(?:\[[^]]*\])?")
"""A name with its value, which may be a list in brackets."""
_LOAD_TIME = "backend"
"""The setting that a CUDA build refuses to change in a process."""


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
    settings = allocator_settings(request.plan.env)
    if request.target != "cpu" and (reason := refused_settings(settings)):
        raise InputError(
            f"PyTorch cannot read the caching allocator's settings {settings!r}: {reason}",
            hint="Write NAME:VALUE with commas between, and True or False.",
        )
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
        # A later trace reports code that cannot be traced.
        if not any(isinstance(cause, UnsupportedError) for cause in causes(error)):
            refused = f"{type(error).__name__}: {one_line(error)}"
    return Built(refused, tuple(dict.fromkeys(messages)))


def refused_settings(variable: str) -> str:
    """Return what torch refuses of the allocator's settings when CUDA is first used; empty if it accepts all.

    Changes the settings of this process. A build without CUDA skips settings that it lacks: names of CUDA's are those
    of its header, and all others have to be read, that is, refused with a value of no type.
    """
    text = (Path(torch.__file__).parent / _HEADER).read_text(encoding="utf-8")
    names = set(re.findall(r'"(\w+)"', re.sub(r'"\s+"', "", text)))
    for setting in _SETTING.findall("".join(variable.split())):
        name = setting.partition(":")[0]
        if name not in names and not _refused(f"{name}:~"):
            return f"there is no setting {name}."
        if name != _LOAD_TIME and (reason := _refused(setting)):
            return reason
    return ""


def _refused(setting: str) -> str:
    try:
        torch._C._accelerator_setAllocatorSettings(setting)
    except (RuntimeError, ValueError) as error:
        return first_line(error)
    return ""


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
