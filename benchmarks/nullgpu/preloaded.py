"""Further imports of the benchmark's job server, so that no run needs them; CUDA is not initialised."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.models.auto.configuration_auto import model_type_to_module_name
from triton.runtime.cache import triton_key

from autotune.step.job import JobFunction
from benchmarks.nullgpu.models import MODELS

JOBS: Mapping[str, JobFunction] = {}

# When cycles of references are freed differs between runs, and Dynamo keeps tensors of compiled calls in them.
# A run that keeps them to its end has the highest peak.
gc.disable()

_WATCHED_SECONDS = 0.3


def _wait_for_watchdog(*_: object) -> None:
    """Let NCCL's watchdog, which looks every 100 ms, release the buckets of a step that has ended.

    DDP builds its buckets anew in the second step. The steps of null GPUs take a few milliseconds, so that peaks would
    have the old buckets, too, or not, by chance.
    """
    if torch.distributed.is_initialized():
        time.sleep(_WATCHED_SECONDS)


register_optimizer_step_post_hook(_wait_for_watchdog)

# Those that generate import what initialises CUDA.
for _trainer in ("sft", "dpo", "kto", "reward"):
    importlib.import_module(f"trl.trainer.{_trainer}_trainer")
# A hash of Triton's own files, which is part of the key of every kernel.
triton_key()
for _type in sorted({str(model["model_type"]) for model in MODELS.values()}):
    _module = model_type_to_module_name(_type)
    _name = _type if importlib.util.find_spec(f"transformers.models.{_module}.modeling_{_type}") else _module
    importlib.import_module(f"transformers.models.{_module}.modeling_{_name}")
