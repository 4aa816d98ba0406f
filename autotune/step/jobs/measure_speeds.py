"""The job ``measure_speeds``: measures a CPU's matrix products and copies, and the host's launch time per operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.core.gpu import GpuSpeeds
from autotune.core.jobs.protocol import SpeedsRequest
from autotune.core.machine import DeviceKind
from autotune.core.step_time import usual_pace
from autotune.step.distributed.group import select_device
from autotune.step.job import JobContext
from autotune.step.run.meters import METERS
from autotune.virtual.operators.callers import CountedCallers

# Large enough to be compute-bound, small enough to be repeated many times.
_MATRIX_SIDE = 256
# Larger than any cache.
_COPIED_BYTES = 1 << 26
# So small that its kernels take almost no time.
_TINY_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_TOKENS = 4
_MIN_STEPS = 15


def measure_speeds(request: SpeedsRequest, _context: JobContext) -> GpuSpeeds:
    """Return the speeds of a CPU, or those of a GPU with the host's measured launch time.

    For a CPU, the fastest of repeated products, copies and steps counts, since other load only slows them.
    """
    if request.gpu is not None:
        select_device("cuda")
        return replace(request.gpu, launch_seconds=_launch_seconds("cuda", request.seconds))
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
        launch_seconds=_launch_seconds("cpu", request.seconds),
    )


def _flops(dtype: torch.dtype, seconds: float) -> float:
    side = torch.ones(_MATRIX_SIDE, _MATRIX_SIDE, dtype=dtype)
    return 2 * _MATRIX_SIDE**3 / _min_seconds(lambda: side @ side, seconds)


def _bandwidth(seconds: float) -> float:
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _min_seconds(lambda: target.copy_(source), seconds)


def _min_seconds(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of repeated runs within ``seconds``, after a first run that prepares kernels."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start_seconds = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_seconds)
    return min(times)


def _launch_seconds(device: DeviceKind, seconds: float) -> float:
    """Return the host's time to launch one operator of a module, from steps of a tiny Llama.

    The host's caches are overwritten before each step, as by the large tensors of a real step on a CPU.
    """
    meter = METERS[device]()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_TINY_LLAMA)).to(device)
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    cache_flush = torch.empty(_COPIED_BYTES // 4)

    def step() -> float:
        cache_flush.zero_()
        meter.synchronize()
        start_seconds = time.perf_counter()
        model(tokens).logits.sum().backward()
        return time.perf_counter() - start_seconds

    # The first step loads the GPU's kernels.
    step()
    with CountedCallers(device) as calls:
        step()
    times = list[float]()
    while len(times) < _MIN_STEPS or sum(times) < seconds:
        times.append(step())
    unit = replace(usual_pace(device), launch_seconds=1.0)
    units = sum(count * unit.host_seconds(caller) for caller, count in calls.counts.items())
    return float((min if device == "cpu" else median)(times) / units)
