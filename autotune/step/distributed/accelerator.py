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

        return property(lambda _: make)

    answers: dict[str, Any] = {
        "is_synchronized_device": lambda *_, **__: False,
        "use_host_timers": lambda *_, **__: False,
        "resolves_data_dependency": lambda *_, **__: False,
        "handles_memory_backpressure": lambda *_, **__: False,
        "device_name": lambda _, index=None: name if index is None else f"{name}:{index}",
        "device": lambda _, index=None: module.device(index),
        "current_device": lambda *_, **__: 0,
        "current_device_name": lambda *_, **__: f"{name}:0",
        "device_count": lambda *_, **__: 1,
        "get_rng_state": lambda *_, **__: module.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
        "manual_seed": lambda *_, **__: None,
        "manual_seed_all": lambda *_, **__: None,
        "Stream": property(lambda *_, **__: module.Stream),
        "Event": property(lambda *_, **__: module.Event),
        "stream": lambda _, stream: module.stream(stream),
        "current_stream": lambda *_, **__: module.current_stream(),
        "default_stream": lambda *_, **__: module.default_stream(),
        "memory_stats": lambda *_, **__: {},
        "total_memory": lambda *_, **__: _MEMORY_BYTES,
        "available_memory": lambda *_, **__: _MEMORY_BYTES,
        "is_fp16_supported": lambda *_, **__: True,
        "is_bf16_supported": lambda *_, **__: True,
        "supported_dtypes": lambda *_, **__: [torch.float32, torch.float16, torch.bfloat16],
        "pin_memory": lambda _, tensor, *__, **___: tensor,
        "on_accelerator": lambda _, tensor: tensor.device.type == name,
        **dict.fromkeys(_MEMORY_FIGURES, lambda *_, **__: 0),
        **{word: typed(dtype) for word, dtype in _TYPES.items()},
    }
    found = type("VirtualAccelerator", (CPU_Accelerator,), answers)()
    found._name, found._communication_backend_name = name, "nccl"
    return found


_MEMORY_FIGURES = (
    "memory_allocated", "max_memory_allocated", "memory_cached", "max_memory_cached", "memory_reserved",
    "max_memory_reserved",
)  # fmt: skip
