"""The job ``measure_speeds``: measures this CPU's matrix products, copies, and the host's time for an operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.core.gpu import GpuSpeeds
from autotune.core.protocol import SpeedsRequest
from autotune.step.job import JobContext
from autotune.virtual.costs import Kind
from autotune.virtual.work import operator_work

# Large enough to be compute-bound, small enough to be repeated many times.
_SIDE = 256
# Larger than any cache.
_COPIED_BYTES = 1 << 26
# So small that its kernels take next to no time.
_TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_TOKENS = 4
_LEAST_STEPS = 5


def measure_speeds(request: SpeedsRequest, _context: JobContext) -> GpuSpeeds:
    """Return the best speeds of repeated products and copies, since other load on the machine only slows them."""
    fp32, fp16, bf16 = (_flops(dtype, request.seconds) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    bandwidth = _bandwidth(request.seconds)
    # A CPU has no transfers between host and device.
    return GpuSpeeds(
        bandwidth,
        fp32,
        fp16,
        bf16,
        tf32=None,
        pcie=bandwidth,
        nvlink=None,
        source="measured",
        launch_seconds=_launch_seconds(request.seconds),
    )


def _flops(dtype: torch.dtype, seconds: float) -> float:
    side = torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _shortest(lambda: side @ side, seconds)


def _bandwidth(seconds: float) -> float:
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _shortest(lambda: target.copy_(source), seconds)


def _shortest(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest run among those in ``seconds``; the first run, which prepares kernels, is not counted."""
    work()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


class _Counted(TorchDispatchMode):
    """Counts the operators that a trace would count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = operator_work(func, args, kwargs or {}, result, device_type="cpu").kind
        self.count += kind not in (Kind.NOTHING, Kind.SYNCHRONIZE)
        return result


def _launch_seconds(seconds: float) -> float:
    """Return the time for one operator of a step of a tiny Llama, with Python of the model and of autograd.

    The caches are overwritten before each step, as the large tensors of a real one do.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_TINY))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long)
    filled = torch.empty(_COPIED_BYTES // 4)

    def step() -> None:
        model(tokens).logits.sum().backward()

    step()
    with _Counted() as counted:
        step()
    found = list[float]()
    while len(found) < _LEAST_STEPS or sum(found) < seconds:
        filled.zero_()
        started = time.perf_counter()
        step()
        found.append(time.perf_counter() - started)
    return float(median(found) / counted.count)
