"""Sets accelerate's process-wide state to a device, as it would be on GPUs of that kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from autotune.core.plan import TrainingPlan
from autotune.step.distributed.engines import Engine, engine_of, zero_stage


def on_device(device: torch.device, plan: TrainingPlan, configure: Callable[[], Any]) -> Any:
    """Return trainer arguments, with accelerate's process-wide state set to the device.

    Args:
        configure: builds the arguments, with ``use_cpu``.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = configure()
    arguments._setup_devices  # noqa: B018 (creates the state)
    PartialState._shared_state["device"] = device
    engine = engine_of(plan)
    # accelerate shards by FSDP only on accelerators (state.py, AcceleratorState), and would take this for a CPU.
    if engine is Engine.FSDP2 or (engine is Engine.DDP and device.type != "cpu"):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    arguments.__dict__["_setup_devices"] = device
    return arguments


def first_place(device: torch.device, plan: TrainingPlan, *, quantized: bool) -> torch.device:
    """Return where the weights are loaded to.

    TRL loads them to the device where there is a single process, and else to the host (trl/trainer/utils.py,
    ``create_model_from_path``), from where the engine takes them. ZeRO-3 partitions each weight as it is created, on
    the device, and bitsandbytes quantises there.
    """
    alone = engine_of(plan) is Engine.NONE
    return device if alone or quantized or zero_stage(plan) == 3 else torch.device("cpu")
