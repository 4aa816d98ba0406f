"""Registers a virtual GPU with PyTorch, from Python and for the rest of the process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import _meta_registrations
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from autotune.virtual.kernels.attention import AMPERE, attention_as_on_cuda
from autotune.virtual.kernels.flash import flash_attention_installed
from autotune.virtual.kernels.flex import flex_attention_compiled
from autotune.virtual.kernels.triton import triton_launches_recorded
from autotune.virtual.patches.autocast import autocast_cache_cleared, cuda_scaled_and_cast, register_autocast
from autotune.virtual.patches.libraries import Patches
from autotune.virtual.recording.ledger import Ledger
from autotune.virtual.recording.records import Capabilities
from autotune.virtual.recording.streams import Event, Stream, current_stream, default_stream
from autotune.virtual.recording.tensors import VIRTUAL

# State of a CUDA generator: seed and offset, 8 bytes each (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp).
_RNG_STATE_BYTES = 16
KERNELS = ("aten::_fused_rms_norm", "aten::mish_backward", "aten::silu_backward")
"""Operators with a kernel on CUDA and a composite implementation elsewhere, in PyTorch 2.11 to 2.15."""
COMPOSITE = "CompositeImplicitAutograd"


MODULE = ModuleType(f"torch.{VIRTUAL}")
MODULE.__dict__.update(
    Event=Event,
    Stream=Stream,
    stream=lambda stream: stream if stream is not None else current_stream(),
    current_stream=current_stream,
    default_stream=default_stream,
    synchronize=lambda device=None: None,
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    current_device=lambda: 0,
    device_count=lambda: 1,
    set_device=lambda device: None,
    device=lambda device: nullcontext(),
    manual_seed=lambda seed: None,
    manual_seed_all=lambda seed: None,
    get_rng_state=lambda device=None: torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8),
    set_rng_state=lambda state, device=None: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    is_bf16_supported=lambda including_emulation=True: True,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: {},
    max_memory_allocated=lambda device=None: 0,
    memory_allocated=lambda device=None: 0,
    memory_reserved=lambda device=None: 0,
    reset_peak_memory_stats=lambda device=None: None,
)


@cache
def registered() -> torch.device:
    """Return the virtual device; the first call registers it with PyTorch."""
    _setup_privateuseone_for_python_backend(rename=VIRTUAL, backend_module=MODULE)
    register_autocast()
    _register_cuda_kernels()
    return torch.device(VIRTUAL)


@cache
def _register_cuda_kernels() -> torch.library.Library:
    """Register a kernel for the virtual device, once, for each of :data:`KERNELS`; the caller keeps the library alive.

    PyTorch registers operators such as ``silu_backward`` with a kernel per backend and, for backends without one, a
    composite of other operators (``CompositeImplicitAutograd`` in ``aten/src/ATen/native/native_functions.yaml``). The
    composite runs before any dispatch mode sees the operator, with temporaries that CUDA's kernel does not have. Only
    the dispatcher of a CUDA build has the kernels for CUDA, so their names are listed here.

    With a registered kernel, PyTorch skips the composite, and the operator reaches the dispatch mode of a trace as on
    CUDA. The mode runs the fake kernel: outputs without temporaries. Operators that this PyTorch does not have, or has
    no composite for, are skipped.
    """
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in KERNELS:
        if torch._C._dispatch_has_kernel(name) and has_kernel(name, COMPOSITE):
            library.impl(name.removeprefix("aten::"), _unreachable(name))
    return library


def _unreachable(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} runs on the virtual device inside a trace only.")

    return kernel


def has_kernel(name: str, key: str) -> bool:
    """Return whether an operator of this PyTorch has a kernel for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def as_on_cuda(ledger: Ledger, gpus: Capabilities) -> Patches:
    """Patch PyTorch and libraries to use the virtual device as a GPU.

    Args:
        ledger: the ledger of a trace on the device named :data:`VIRTUAL`.
        gpus: compute capabilities that select kernels.
    """
    yield attention_as_on_cuda(gpus)
    yield from _experts_as_on_cuda(gpus)
    yield from flash_attention_installed()
    yield from flex_attention_compiled(ledger)
    yield from triton_launches_recorded(ledger)
    yield autocast_cache_cleared()
    yield from cuda_scaled_and_cast()
    yield from _scaling_as_on_cuda()
    yield mock.patch.object(torch.Tensor, "pin_memory", _pinned)
    yield mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)
    yield mock.patch.object(MODULE, "empty_cache", ledger.empty_cache)
    # FSDP2 calls it to wait for weights that it prefetched and did not use.
    yield mock.patch.object(torch.accelerator, "current_stream", current_stream)
    yield _data_first_on_the_host()
    # PyTorch's shape functions have layouts of their own for CUDA.
    hinted = _meta_registrations.device_hint
    yield mock.patch.object(
        _meta_registrations, "device_hint", lambda tensor: "cuda" if hinted(tensor) == VIRTUAL else hinted(tensor)
    )
    # PyTorch's optimizers use their foreach implementation only where all parameters have exactly these types.
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module = import_module(name)
        yield mock.patch.object(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])


def _experts_as_on_cuda(gpus: Capabilities) -> Patches:
    """Patch transformers to use its own loop for grouped products before Ampere (``_can_use_grouped_mm``)."""
    if "transformers" not in sys.modules:
        return
    module = import_module("transformers.integrations.moe")
    can_use = module._can_use_grouped_mm

    def can_use_here(*args: Any) -> bool:
        return gpus.decide(lambda capability: capability >= AMPERE) and can_use(*args)

    yield mock.patch.object(module, "_can_use_grouped_mm", can_use_here)


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Copy a tensor to pinned memory, unless it is pinned, as aten/src/ATen/native/Memory.cpp does."""
    if tensor.is_pinned():
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True).copy_(tensor)


@contextmanager
def _data_first_on_the_host() -> Iterator[None]:
    """Patch ``torch.tensor(data, device=…)`` to build on the host and copy, so that dispatch modes see the copy."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _scaling_as_on_cuda() -> Patches:
    """Patch ``accelerate.Accelerator`` to scale float16 gradients on the device as it does on CUDA.

    ``Accelerator.__init__`` has a list of device types with gradient scaling, and ``get_grad_scaler`` checks for their
    drivers.
    """
    module = sys.modules.get("accelerate.accelerator")
    if module is None:
        return
    build = module.Accelerator.__init__

    @functools.wraps(build)
    def built(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        def scaler(distributed_type: Any = None, **words: Any) -> torch.amp.GradScaler:
            return torch.amp.GradScaler(VIRTUAL, **words)

        with (
            mock.patch.object(module.Accelerator, "device", torch.device("cuda")),
            mock.patch.object(module, "get_grad_scaler", scaler),
        ):
            build(accelerator, *args, **kwargs)

    yield mock.patch.object(module.Accelerator, "__init__", built)
