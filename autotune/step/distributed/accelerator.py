"""DeepSpeed's accelerator for the virtual GPU: it answers as DeepSpeed's own does for CUDA."""

from __future__ import annotations

from typing import Any

import torch

from autotune.units import GIB

# DeepSpeed asks for the device's memory only to report it.
_MEMORY_BYTES = 80 * GIB
_TYPES = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
}  # fmt: skip


def accelerator(device: torch.device) -> Any:
    """Return an accelerator of DeepSpeed for a device: its own one for the CPU, else one like that for CUDA.

    What differs between the two is in ``deepspeed/accelerator/cuda_accelerator.py`` and ``cpu_accelerator.py``.
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    name = device.type
    if name == "cpu":
        return CPU_Accelerator()
    module = getattr(torch, name)

    def typed(dtype: torch.dtype) -> property:
        def make(*given: Any) -> torch.Tensor:
            sizes = not given or isinstance(given[0], int)
            return (torch.empty if sizes else torch.tensor)(*given, dtype=dtype, device=name)

        return property(lambda self: make)

    answers: dict[str, Any] = {
        "is_synchronized_device": lambda self: False,
        "use_host_timers": lambda self: False,
        "resolves_data_dependency": lambda self: False,
        "handles_memory_backpressure": lambda self: False,
        "device_name": lambda self, index=None: name if index is None else f"{name}:{index}",
        "device": lambda self, index=None: module.device(index),
        "current_device": lambda self: 0,
        "current_device_name": lambda self: f"{name}:0",
        "device_count": lambda self: 1,
        "get_rng_state": lambda self, index=None: module.get_rng_state(),
        "set_rng_state": lambda self, state, index=None: None,
        "manual_seed": lambda self, seed: None,
        "manual_seed_all": lambda self, seed: None,
        "Stream": property(lambda self: module.Stream),
        "Event": property(lambda self: module.Event),
        "stream": lambda self, stream: module.stream(stream),
        "current_stream": lambda self, index=None: module.current_stream(),
        "default_stream": lambda self, index=None: module.default_stream(),
        "memory_stats": lambda self, index=None: {},
        "total_memory": lambda self, index=None: _MEMORY_BYTES,
        "available_memory": lambda self, index=None: _MEMORY_BYTES,
        "is_fp16_supported": lambda self: True,
        "is_bf16_supported": lambda self: True,
        "supported_dtypes": lambda self: [torch.float32, torch.float16, torch.bfloat16],
        "pin_memory": lambda self, tensor, *_, **__: tensor,
        "on_accelerator": lambda self, tensor: tensor.device.type == name,
        **dict.fromkeys(_MEMORY_FIGURES, lambda self, index=None: 0),
        **{word: typed(dtype) for word, dtype in _TYPES.items()},
    }
    found = type("VirtualAccelerator", (CPU_Accelerator,), answers)()
    found._name, found._communication_backend_name = name, "nccl"
    return found


_MEMORY_FIGURES = (
    "memory_allocated", "max_memory_allocated", "memory_cached", "max_memory_cached", "memory_reserved",
    "max_memory_reserved",
)  # fmt: skip
