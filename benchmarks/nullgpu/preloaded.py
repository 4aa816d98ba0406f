"""What a job server of the benchmark imports beside the rest, without initialising CUDA, so that no run does it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Mapping

from transformers.models.auto.configuration_auto import model_type_to_module_name
from triton.runtime.cache import triton_key

from autotune.step.job import JobType
from benchmarks.nullgpu.models import MODELS

JOBS: Mapping[str, JobType] = {}

# When cycles of references are freed differs between runs, and Dynamo keeps tensors of compiled calls in them.
# A run that keeps them to its end has the highest peak.
gc.disable()

# Those that generate import what initialises CUDA.
for _trainer in ("sft", "dpo", "kto", "reward"):
    importlib.import_module(f"trl.trainer.{_trainer}_trainer")
# A hash of Triton's own files, which is part of the key of every kernel.
triton_key()
for _type in sorted({str(model["model_type"]) for model in MODELS.values()}):
    _module = model_type_to_module_name(_type)
    _name = _type if importlib.util.find_spec(f"transformers.models.{_module}.modeling_{_type}") else _module
    importlib.import_module(f"transformers.models.{_module}.modeling_{_name}")
