"""Sets accelerate's process-wide state to a device and an engine, as on real GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from autotune.core.plan import TrainingPlan
from autotune.step.distributed.engines import Engine, engine_of
from autotune.techniques.sharding import zero_stage


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
    # accelerate supports FSDP only on accelerators (state.py, AcceleratorState). It would treat this device as a CPU
    # and silently fall back to DDP.
    if engine is Engine.FSDP2 or (engine is Engine.DDP and device.type != "cpu"):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    arguments.__dict__["_setup_devices"] = device
    return arguments


@contextmanager
def until_update(
    accelerator: Any, micro_batch: AbstractContextManager[object], on_update: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run a micro-batch in its context; if DeepSpeed continues with the update, end that first and call ``on_update``.

    With DeepSpeed, the backward pass of a step's last micro-batch calls the optimizer
    (``accelerate/utils/deepspeed.py``, ``DeepSpeedEngineWrapper.backward``).
    """
    with ExitStack() as running:
        running.enter_context(micro_batch)
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is None:
            yield
            return
        update = wrapped.engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            running.close()
            on_update()
            return update(*args, **kwargs)

        with mock.patch.object(wrapped.engine, "step", step):
            yield


def loading_device(device: torch.device, plan: TrainingPlan, *, quantized: bool) -> torch.device:
    """Return the device to which TRL loads the weights.

    A single process loads them to the device. With several, TRL loads them to the host (trl/trainer/utils.py,
    ``create_model_from_path``), and the engine moves them. ZeRO-3 partitions each weight on the device at creation, and
    bitsandbytes quantises there.
    """
    alone = engine_of(plan) is Engine.NONE
    return device if alone or quantized or zero_stage(plan) == 3 else torch.device("cpu")


@contextmanager
def acting_as_rank(rank: int) -> Iterator[None]:
    """Make this process act as rank ``rank`` where libraries select the rank that writes a checkpoint.

    transformers and accelerate read accelerate's state (``TrainingArguments.should_save``); PyTorch and DeepSpeed read
    the process group (``torch/distributed/_state_dict_utils.py``, ``ranks_only``; ``deepspeed/runtime/engine.py``,
    ``_zero3_consolidated_16bit_state_dict``). Shards remain those of this rank.
    """
    state = {"process_index": rank, "local_process_index": rank}
    with mock.patch.dict(PartialState._shared_state, state), mock.patch.object(dist, "get_rank", return_value=rank):
        yield
