"""The training loop of accelerate's ``benchmarks/fsdp2`` with PyTorch's own ``fully_shard``, for a virtual device.

It follows ``prepare_torch`` of ``utils.py``, with the optimizer made last, and ``train`` of ``main.py``. accelerate's
integration of that time sharded alike; today's also shards embedding and head by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.virtual import phase, trace, trace_inputs
from autotune.virtual.ranks import World
from autotune.virtual.recording.replay import replay
from benchmarks.published.tables import Outcome

_STEPS = 2


def training(settings: Mapping[str, Any], counted: Callable[[int], None]) -> Callable[[torch.device], None]:
    """Return a function of a device that trains for two steps: the optimizer's state appears in the first.

    Args:
        settings: of the table's loop, with those of a row over them.
        counted: is told the number of parameters.
    """

    def run(device: torch.device) -> None:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings["model"]))
        counted(model.num_parameters())
        half = torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half)
        mesh = init_device_mesh(device.type, (settings["processes"],))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        forward = torch.autocast(device_type=device.type, dtype=half)(model.forward.__func__)
        model.forward = MethodType(convert_outputs_to_fp32(forward), model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for number in range(_STEPS):
            with phase(str(number)):
                ids = trace_inputs(torch.ones(settings["rows"], settings["tokens"], dtype=torch.long)).to(device)
                optimizer.zero_grad()
                outputs = model(input_ids=ids, attention_mask=ids, labels=ids, use_cache=False)
                loss = outputs.loss
                loss.backward()
                optimizer.step()

    return run


def outcome(settings: Mapping[str, Any], capability: tuple[int, int]) -> Outcome:
    """Return the peaks of PyTorch's allocator in bytes."""
    started, counted = time.perf_counter(), list[int]()
    traced = trace(training(settings, counted.append), capability=capability, world=World(settings["processes"]))
    found = replay(traced, capability=capability)
    figures: dict[str, float] = {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}
    return Outcome(figures, counted[-1], "", time.perf_counter() - started)
