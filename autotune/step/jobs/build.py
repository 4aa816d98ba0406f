"""The job ``build``: builds a plan's trainer on the virtual device; returns TRL's refusals, changes and warnings."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autotune.core.configuration import Built
from autotune.core.traced import TraceRequest
from autotune.errors import InputError, one_line
from autotune.step.distributed.zero import engine_on
from autotune.step.fields import overrides
from autotune.step.job import JobContext
from autotune.step.models.loading import load_config, load_processor
from autotune.step.models.shrink import FEWEST_BUILT, first_layers
from autotune.step.objects import config
from autotune.step.run.traced_training import capability_of, world_of
from autotune.step.run.virtual_trainer import OVERRIDDEN_IN_TRACES, TracedRows, build_virtual
from autotune.step.trainers import adapter
from autotune.step.trainers.prompts import reward_function
from autotune.virtual import UnsupportedError
from autotune.virtual import trace as run_virtually

# Libraries whose warnings are about the user's arguments.
_WARNING_LIBRARIES = ("trl", "transformers", "peft", "accelerate")


def build(request: TraceRequest, context: JobContext) -> Built:
    """Build the trainer of a plan, with a few layers of its model and a few rows.

    Raises:
        InputError: the model's configuration or tokenizer cannot be used, or there is no such reward function.
    """
    # No real GPU is used.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    known, plan = adapter(request.plan.trainer), request.plan
    model_config = first_layers(load_config(request.model, known.head), FEWEST_BUILT)
    processor = load_processor(request.model, known.processor)
    # Imported before the virtual device is in use: side effects of the import must not be traced.
    for name in plan.rewards:
        reward_function(name)
    rows = TracedRows(request.worst, chosen=request.chosen)
    messages: list[str] = []
    used: dict[str, Any] = {}

    def run(device: torch.device) -> None:
        with tempfile.TemporaryDirectory(dir=context.folder) as folder, engine_on(device, plan):
            # Validate the planned arguments: the trainer below has fewer micro-batches per step.
            config(plan, output_dir=folder, **OVERRIDDEN_IN_TRACES)
            with _listening(messages):
                trainer = build_virtual(known, plan, model_config, processor, rows, device, Path(folder))
            used.update({name: getattr(trainer.args, name, None) for name in plan.args if name not in _SET_BY_TRACES})

    try:
        run_virtually(run, target=request.target, capability=capability_of(request.gpu), world=world_of(plan))
    except InputError:
        raise
    except UnsupportedError:
        # The trace that follows reports it.
        return Built(warnings=tuple(messages))
    except Exception as error:  # noqa: BLE001 any error of a library is its refusal of the plan
        return Built(refused=f"{type(error).__name__}: {one_line(error)}", warnings=tuple(messages))
    return Built(overrides=tuple(overrides(plan.args, used)), warnings=tuple(dict.fromkeys(messages)))


# Arguments that every trace sets itself.
_SET_BY_TRACES = frozenset({*OVERRIDDEN_IN_TRACES, "gradient_accumulation_steps", "eval_strategy", "model_init_kwargs"})


@contextmanager
def _listening(messages: list[str]) -> Iterator[None]:
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
        of_libraries = (item for item in caught if any(f"/{name}/" in item.filename for name in _WARNING_LIBRARIES))
        messages.extend(" ".join(str(item.message).split()) for item in of_libraries)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
