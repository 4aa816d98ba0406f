"""vLLM's own rule for the memory that it reserves next to a training, and what its key-value cache then holds.

This is the one part of an estimate that is no trace: vLLM does not run on a virtual device. It takes the share of the
GPU that it is given, whatever it needs, so its own arithmetic says what it holds. Read from vLLM 0.31 and TRL 1.16:

- ``vllm/v1/worker/utils.py``, ``request_memory``: requested = ceil(total memory x ``gpu_memory_utilization``); the
  start fails unless as much is free.
- ``vllm/v1/worker/gpu_worker.py``, ``determine_available_memory``: key-value cache = requested - what vLLM has taken
  since it began (weights, libraries) - peak of activations in a profiling run - estimate of its CUDA graphs.
- ``vllm/v1/core/kv_cache_utils.py``, ``check_enough_kv_cache_memory``: the cache, less one block that stays empty, has
  to hold a sequence of ``max_model_len``; ``vllm/v1/kv_cache_interface.py``: a block holds 16 tokens.
- ``vllm/v1/worker/gpu_worker.py``, ``sleep``: level 2 drops the weights and the cache. CUDA graphs and the libraries'
  workspaces are not in the pool that is dropped.
- ``trl/generation/vllm_generation.py``: ``LLM(...)`` gets no dtype, which makes weights and cache 16 bits wide
  (``vllm/config/model.py``, ``_resolve_auto_dtype``); it starts after the model has been loaded; with sleep mode, it
  sleeps whenever it does not generate, and wakes its weights before it gets the trained ones (``sync_weights``), and
  its cache after that (``generate``). If the trained model is in 4 bits, ``LLM`` gets ``quantization="bitsandbytes"``:
  the weights of linear modules are quantised as they are loaded, with their scales quantised in turn, which are then
  expanded to 32 bits again (``vllm/model_executor/model_loader/bitsandbytes_loader.py``,
  ``quantize_4bit(compress_statistics=True)`` and ``dequantize_dq``). A server is started without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.core.estimate import MemoryEstimate
from autotune.core.memory_timeline import AT_REST, VLLM
from autotune.core.plan import TrainingPlan
from autotune.core.program import MICRO_BATCH
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile
from autotune.techniques.base import default_with
from autotune.techniques.vllm import SERVER
from autotune.techniques.vllm_gpu_memory_utilization import VllmGpuMemoryUtilization
from autotune.trainers import find_trainer
from autotune.trainers.prompts import GENERATION, SYNCHRONISATION, Prompted
from autotune.units import GIB, format_bytes

BLOCK_TOKENS = 16
"""Tokens of a block of the cache (``CacheConfig.DEFAULT_BLOCK_SIZE``)."""
TYPE_BYTES = 2
"""Bytes of a weight, and of an element of the cache."""
QUANTISED_BYTES = (4 + 32 / 64) / 8
"""Bytes of a weight in 4 bits: each 64 of them have a scale of 32 bits."""
BESIDE_WEIGHTS_BYTES = 2 * GIB
"""Assumption: what vLLM holds in addition to weights and cache. Only its profiling run on a GPU can tell.

Logs that users published say, for one GPU: activations 0.24 to 2.5 GiB and libraries 0.01 to 0.4 GiB (vLLM issues
17117 and 11251, llm-d-fast-model-actuation issue 746), and 0.4 to 0.5 GiB for the 16 to 86 CUDA graphs of vLLM 0.2x
(LMCache issue 3430, gpustack/runner 251). TRL profiles 4,096 tokens, and captures few graphs, since it limits the
sequences to those of a generation batch.
"""
ASLEEP_BYTES = GIB
"""Assumption: what vLLM still holds while it sleeps, beyond the CUDA context that it shares with the training.

Published logs: 0.27 GiB (vLLM issue 17117), 774 MiB with the context (NVIDIA-NeMo/RL issue 223), 1.38 GiB with the
context in a log of August 2025. Servers with more CUDA graphs and several GPUs report 4 to 6 GiB.
"""
SENT_BYTES = GIB
"""Size of the chunks in which weights are sent to a vLLM server; each may exceed it by one weight.

Two exist at a time (``vllm/distributed/weight_transfer/packed_tensor.py``), and are freed afterwards.
"""
ASSUMPTIONS = (
    f"{format_bytes(BESIDE_WEIGHTS_BYTES)} go to its activations, CUDA graphs and libraries (0.4 to 3 GiB in logs)",
    f"asleep, it still holds {format_bytes(ASLEEP_BYTES)} (0.3 to 1.4 GiB in logs, on one GPU)",
    "its weights and its cache are in 16 bits; of a model in 4 bits, the weights in its layers are in 4 bits here too",
    "its cache holds all tokens in all layers, those with a sliding window too",
    "PyTorch returns all cached memory when vLLM wakes up, as TRL asks it to",
)
"""Assumptions beyond vLLM's rule, in sentences."""


@dataclass(frozen=True)
class Reservation:
    """The memory that an engine takes on one GPU.

    Attributes:
        requested_bytes: all of it.
        cache_bytes: its key-value cache; negative if the rest needs more than is requested.
        sequences: of the longest that the cache holds at once; None if the model's cache is not known.
    """

    requested_bytes: int
    cache_bytes: int
    sequences: float | None

    @property
    def starts(self) -> bool:
        """Whether vLLM starts with such a cache."""
        return self.cache_bytes > 0 and (self.sequences is None or self.sequences >= 1)


@dataclass(frozen=True)
class Engine:
    """vLLM, as TRL starts it.

    Attributes:
        on_server: whether it runs on other GPUs.
        sleeps: whether it sleeps unless it generates.
        utilization: share of the GPU's memory that it takes.
        parallel: GPUs that share its weights and its cache.
        tokens: of the longest sequence, or None if the model has no limit.
        model: whose weights it loads.
        total_bytes: memory of each GPU.
        in_4_bits: whether it quantises the weights of linear modules.
        trained_bytes: bytes of a weight as it is trained, and as a server is sent it.
    """

    on_server: bool
    sleeps: bool
    utilization: float
    parallel: int
    tokens: int | None
    model: ModelProfile
    total_bytes: int
    in_4_bits: bool = False
    trained_bytes: int = 4

    @property
    def block_bytes(self) -> int | None:
        """Size of a block of the cache, in all layers, on one of the GPUs; None if it is not known."""
        cache = self.model.cache
        if cache is None:
            return None
        return cache.layers * max(1, cache.heads // self.parallel) * cache.elements * TYPE_BYTES * BLOCK_TOKENS

    @property
    def reservation(self) -> Reservation:
        """The engine's bytes of each GPU."""
        requested = math.ceil(self.total_bytes * self.utilization)
        cache, block = cache_bytes(requested, self.weights_bytes, BESIDE_WEIGHTS_BYTES), self.block_bytes
        held = None if block is None or self.tokens is None else sequences_held(cache, block, self.tokens)
        return Reservation(requested, cache, held)

    @property
    def weights_bytes(self) -> int:
        """The bytes of its weights on one of the GPUs."""
        quantised = self.model.quantizable if self.in_4_bits else 0
        weights = (self.model.parameters - quantised) * TYPE_BYTES + round(quantised * QUANTISED_BYTES)
        return weights // self.parallel

    def held_bytes(self, phase: str) -> int:
        """Return the engine's bytes of a training GPU during a phase of the training."""
        if self.on_server:
            return self._sync_bytes if phase in (SYNCHRONISATION, GENERATION) else 0
        if not self.sleeps or phase == GENERATION:
            return self.reservation.requested_bytes
        return ASLEEP_BYTES + (self.weights_bytes if phase == SYNCHRONISATION else 0)

    @property
    def _sync_bytes(self) -> int:
        chunk = SENT_BYTES + self.model.largest_weight * self.trained_bytes
        return min(2 * chunk, self.model.parameters * self.trained_bytes)

    @property
    def why_not(self) -> str:
        """Why vLLM does not start, whatever training needs; empty if it does."""
        found = self.reservation
        if self.on_server or found.starts:
            return ""
        share = f"vLLM does not start with {self.utilization:g} of the GPU, {format_bytes(found.requested_bytes)}"
        if found.cache_bytes <= 0:
            return f"{share}: that is less than its weights and what else it holds"
        return (
            f"{share}: a key-value cache of {format_bytes(found.cache_bytes)} does not hold one sequence of "
            f"{self.tokens:,} tokens"
        )

    def together(self, training: MemoryEstimate) -> MemoryEstimate:
        """Return the memory of a training with its engine; the time of generation is not known, nor that of a step.

        Args:
            training: what was traced without an engine.
        """
        training = replace(training, step_seconds=None)
        asleep = self.held_bytes(MICRO_BATCH)
        at_rest = {GENERATION: training.generation_bytes, SYNCHRONISATION: training.synchronisation_bytes}
        held, beside = max(((size or 0, self.held_bytes(phase)) for phase, size in at_rest.items()), key=sum)
        if training.device_bytes + asleep >= held + beside:
            parts = {**training.breakdown, **({VLLM: asleep} if asleep else {})}
            return replace(training, beside_bytes=asleep, breakdown=parts)
        parts = {AT_REST: held - training.context_bytes, VLLM: beside, "context": training.context_bytes}
        return replace(training, beside_bytes=held + beside - training.device_bytes, breakdown=parts)

    def assumed(self) -> Iterator[str]:
        """Yield what is assumed of the engine, in sentences."""
        if self.on_server:
            buffers = format_bytes(self._sync_bytes)
            yield f"the server holds nothing on this GPU, which sends it the weights from buffers of up to {buffers}"
            return
        yield from assumed_beside(self.model)


def engine_of(plan: TrainingPlan, setting: Setting) -> Engine | None:
    """Return the engine that a plan starts, or None if transformers generates."""
    if not plan.args.get("use_vllm"):
        return None
    trainer, model = find_trainer(plan.trainer), setting.workload.model
    assert isinstance(trainer, Prompted)
    on_server = plan.args.get("vllm_mode") == SERVER
    dtype = str(plan.model.get("dtype") or "float32").replace("auto", model.dtype)
    share, usual = plan.args.get(VllmGpuMemoryUtilization.name), default_with(VllmGpuMemoryUtilization, trainer.name)
    return Engine(
        on_server=on_server,
        sleeps=bool(plan.args.get("vllm_enable_sleep_mode")),
        utilization=float(str(usual if share is None else share)),
        parallel=plan.number("vllm_tensor_parallel_size") or 1,
        tokens=trainer.vllm_tokens(plan) or model.max_positions,
        model=model,
        total_bytes=setting.machine.hardware.memory_bytes,
        in_4_bits=bool(plan.model.get("load_in_4bit")) and not on_server,
        trained_bytes=2 if dtype in ("bfloat16", "float16") else 4,
    )


def with_vllm(training: MemoryEstimate, plan: TrainingPlan, setting: Setting) -> MemoryEstimate | str:
    """Return the memory of a training together with the engine that its plan starts, or why that does not start."""
    engine = engine_of(plan, setting)
    return training if engine is None else engine.why_not or engine.together(training)


def cache_bytes(requested: int, weights_bytes: int, beside_bytes: int) -> int:
    """Return the size of the key-value cache.

    Args:
        beside_bytes: what libraries took since vLLM began, the peak of activations, and CUDA graphs.
    """
    return requested - weights_bytes - beside_bytes


def sequences_held(available_bytes: int, block: int, tokens: int) -> float:
    """Return how many sequences a cache holds. One block stays empty, which vLLM's "Maximum concurrency" counts too.

    Args:
        block: size of a block in bytes.
    """
    return max(0, available_bytes // block - 1) / -(-tokens // BLOCK_TOKENS)


def assumed_beside(model: ModelProfile) -> Iterator[str]:
    """Yield what is assumed of vLLM on the GPU of a training, in sentences."""
    yield from ASSUMPTIONS
    if model.cache is None:
        yield "the cache of a token is not known for this model, so whether it holds a sequence is not either"
