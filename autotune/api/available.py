"""Measures the memory that is available to a running training on its device."""

from __future__ import annotations

from typing import Any

from autotune.errors import InputError
from autotune.inspection.gpus import UNMEASURED_CONTEXT_BYTES, listed_gpu


def available_bytes(args: Any, trainer: Any) -> int | None:
    """Return the memory available to the training: free memory plus the memory that it already uses.

    Memory of the process outside the training, such as a model of an earlier notebook cell, does not become available.

    Returns:
        The bytes; None on a CPU.

    Raises:
        InputError: the training is on another kind of device.
        RuntimeError: CUDA fails.
    """
    if args.device.type == "cpu":
        return None
    if args.device.type != "cuda":
        raise InputError(
            f"A training on {args.device.type} is not traced, only one on a CPU or on a GPU of CUDA or ROCm."
        )
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(args.device)
    held_bytes, own_bytes = torch.cuda.memory_reserved(args.device), _own_bytes(args, trainer)
    if own_bytes is not None:
        held_bytes -= max(0, torch.cuda.memory_allocated(args.device) - own_bytes)
    gpu = listed_gpu(torch.cuda.get_device_name(args.device))
    context_bytes = gpu.context_bytes if gpu is not None else UNMEASURED_CONTEXT_BYTES
    available: int = min(total_bytes, free_bytes + held_bytes + context_bytes)
    return available


def _own_bytes(args: Any, trainer: Any) -> int | None:
    """Return the bytes of a trainer's models and optimizer state on its device, which a trace counts as well.

    None if the training holds further memory there: of an engine, of vLLM, or of a quantised model.
    """
    import torch

    if trainer is None or args.world_size > 1 or getattr(args, "use_vllm", False):
        return None
    if trainer.is_deepspeed_enabled or getattr(trainer.model, "is_quantized", False):
        return None
    models = [part for part in vars(trainer).values() if isinstance(part, torch.nn.Module)]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    states = trainer.optimizer.state.values() if trainer.optimizer is not None else ()
    tensors += [part for state in states for part in state.values() if isinstance(part, torch.Tensor)]
    sizes: dict[int, int] = {id(each): each.nbytes for each in tensors if each.device.type == args.device.type}
    return sum(sizes.values())
