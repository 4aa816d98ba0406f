"""Memory of vLLM next to a training, and the capacity of its key-value cache, by vLLM's own rule.

vLLM does not run on a virtual device, so this is the one part of an estimate without a trace. It reserves a given share
of the GPU, whatever it needs. The rule, from vLLM 0.31 and TRL 1.16:

- ``vllm/v1/worker/utils.py``, ``request_memory``: requested = ceil(total memory x ``gpu_memory_utilization``); the
  start fails unless as much is free.
- ``vllm/v1/worker/gpu_worker.py``, ``determine_available_memory``: key-value cache = requested - memory allocated since
  the start (weights, libraries) - peak of activations in a profiling run - estimate of CUDA graphs.
- ``vllm/v1/core/kv_cache_utils.py``, ``check_enough_kv_cache_memory``: the cache, less one block that stays empty, has
  to hold a sequence of ``max_model_len``; ``vllm/v1/kv_cache_interface.py``: a block holds 16 tokens.
- ``vllm/v1/worker/gpu_worker.py``, ``sleep``: level 2 frees the weights and the cache, but neither CUDA graphs nor the
  libraries' workspaces, which are in another pool.
- ``trl/generation/vllm_generation.py``: ``LLM(...)`` gets no dtype, which makes weights and cache 16 bits wide
  (``vllm/config/model.py``, ``_resolve_auto_dtype``); it starts after the model has been loaded; with sleep mode, it
  sleeps except during generation; ``sync_weights`` wakes its weights, then ``generate`` its cache. If the trained model
  is in 4 bits, ``LLM`` gets ``quantization="bitsandbytes"``, which a server does not: weights of linear modules are
  quantised, with scales in 32 bits (``vllm/model_executor/model_loader/bitsandbytes_loader.py``, ``dequantize_dq``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.memory_timeline import AT_REST, VLLM
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
"""Bytes of a weight in 4 bits: 64 weights share a scale of 32 bits."""
OVERHEAD_BYTES = 2 * GIB
"""Assumption: memory of vLLM in addition to weights and cache, which only its profiling run on a GPU measures.

Published logs, for one GPU: activations 0.24 to 2.5 GiB and libraries 0.01 to 0.4 GiB (vLLM issues 17117 and 11251,
llm-d-fast-model-actuation issue 746), and 0.4 to 0.5 GiB for the 16 to 86 CUDA graphs of vLLM 0.2x (LMCache issue 3430,
gpustack/runner 251). TRL profiles 4,096 tokens, and captures few graphs: those of a generation batch's sequences."""
SLEEPING_BYTES = GIB
"""Assumption: memory of a sleeping vLLM, without the CUDA context that it shares with the training.

Published logs: 0.27 GiB (vLLM issue 17117), 774 MiB with the context (NVIDIA-NeMo/RL issue 223), 1.38 GiB with the
context in a log of August 2025. Servers with more CUDA graphs and several GPUs report 4 to 6 GiB."""
SYNC_CHUNK_BYTES = GIB
"""Size of the chunks in which weights are sent to a vLLM server, two at a time; each may exceed it by one weight
(``vllm/distributed/weight_transfer/packed_tensor.py``)."""


@dataclass(frozen=True)
class Engine:
    """vLLM as started by TRL.

    Attributes:
        on_server: whether it runs on other GPUs.
        sleeps: whether it sleeps except during generation.
        utilization, parallel: ``gpu_memory_utilization``, 0 to 1, and ``tensor_parallel_size``.
        tokens: maximum length of a sequence; None if the model has no limit.
        total_bytes: memory of each GPU.
        in_4_bits: whether it quantises the weights of linear modules.
        trained_bytes: bytes of a weight of the trained model, which a server receives in the same dtype.
        overhead_bytes: libraries' memory since it started, the peak of activations, and CUDA graphs.
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
    overhead_bytes: int = OVERHEAD_BYTES

    @property
    def block_bytes(self) -> int | None:
        """Size of a block of the cache, in all layers, on one of the GPUs; None if unknown."""
        cache = self.model.cache
        if cache is None:
            return None
        return cache.layers * max(1, cache.heads // self.parallel) * cache.elements * TYPE_BYTES * BLOCK_TOKENS

    @property
    def requested_bytes(self) -> int:
        """Memory that it reserves on each GPU."""
        return math.ceil(self.total_bytes * self.utilization)

    @property
    def cache_bytes(self) -> int:
        """Size of its key-value cache on each GPU; negative if weights and overhead exceed the reservation."""
        return self.requested_bytes - self.weights_bytes - self.overhead_bytes

    @property
    def sequences(self) -> float | None:
        """Number of sequences of maximum length in the cache without its empty block; None if unknown.

        vLLM's log calls it "Maximum concurrency", and counts the empty block.
        """
        block = self.block_bytes
        if block is None or self.tokens is None:
            return None
        return max(0, self.cache_bytes // block - 1) / -(-self.tokens // BLOCK_TOKENS)

    @property
    def weights_bytes(self) -> int:
        """Bytes of its weights on one of the GPUs."""
        quantized = self.model.quantizable if self.in_4_bits else 0
        weights = (self.model.parameters - quantized) * TYPE_BYTES + round(quantized * QUANTISED_BYTES)
        return weights // self.parallel

    def used_bytes(self, phase: str) -> int:
        """Return the engine's bytes on a training GPU during a phase of the training."""
        if self.on_server:
            return self._sync_bytes if phase in (SYNCHRONISATION, GENERATION) else 0
        if not self.sleeps or phase == GENERATION:
            return self.requested_bytes
        return SLEEPING_BYTES + (self.weights_bytes if phase == SYNCHRONISATION else 0)

    @property
    def _sync_bytes(self) -> int:
        chunk = SYNC_CHUNK_BYTES + self.model.largest_weight * self.trained_bytes
        return min(2 * chunk, self.model.parameters * self.trained_bytes)

    @property
    def start_error(self) -> str:
        """The reason that vLLM does not start, independent of the training; empty if it starts."""
        holds_one = self.sequences is None or self.sequences >= 1
        if self.on_server or (self.cache_bytes > 0 and holds_one):
            return ""
        share = f"vLLM does not start with {self.utilization:g} of the GPU, {format_bytes(self.requested_bytes)}"
        if self.cache_bytes <= 0:
            return f"{share}: that is less than its weights, activations, CUDA graphs and libraries"
        held = format_bytes(self.cache_bytes)
        return f"{share}: a key-value cache of {held} does not hold one sequence of {self.tokens:,} tokens"

    def with_training(self, training: MemoryEstimate) -> MemoryEstimate:
        """Return the memory of a training together with the engine, without step time: generation's is unknown."""
        training = replace(training, step_seconds=None)
        asleep = self.used_bytes(MICRO_BATCH)
        peaks = {GENERATION: training.generation_bytes, SYNCHRONISATION: training.synchronisation_bytes}
        needed, held, phase = max(
            ((size or 0, self.used_bytes(phase), phase) for phase, size in peaks.items()),
            key=lambda item: item[0] + item[1],
        )
        if training.device_bytes + asleep >= needed + held:
            parts = {**training.breakdown, **({VLLM: asleep} if asleep else {})}
            return replace(training, vllm_bytes=asleep, breakdown=parts)
        parts = {AT_REST: needed - training.context_bytes, VLLM: held, "context": training.context_bytes}
        vllm_bytes = needed + held - training.device_bytes
        return replace(training, vllm_bytes=vllm_bytes, breakdown=parts, phase=phase)

    def assumptions(self) -> Iterator[str]:
        """Yield assumptions about the engine, in sentences."""
        if self.on_server:
            buffers = format_bytes(self._sync_bytes)
            yield f"the server needs no memory of this GPU, except buffers of up to {buffers} to send it the weights"
            return
        yield from engine_assumptions(self.model)


def engine_of(plan: TrainingPlan, setting: Setting) -> Engine | None:
    """Return the vLLM engine of a plan, or None without vLLM."""
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
    """Return the memory of a training together with its plan's engine, or the reason that vLLM does not start."""
    engine = engine_of(plan, setting)
    return training if engine is None else engine.start_error or engine.with_training(training)


def engine_assumptions(model: ModelProfile) -> Iterator[str]:
    """Yield assumptions about vLLM on a training GPU beyond vLLM's rule, in sentences."""
    overhead, asleep = format_bytes(OVERHEAD_BYTES), format_bytes(SLEEPING_BYTES)
    yield f"{overhead} go to its activations, CUDA graphs and libraries (0.4 to 3 GiB in logs)"
    yield f"asleep, it still holds {asleep} (0.3 to 1.4 GiB in logs, on one GPU)"
    in_layers = "if the trained model is in 4 bits, the weights in its layers are in 4 bits here too"
    yield f"its weights and its cache are in 16 bits; {in_layers}"
    yield "its cache holds all tokens in all layers, those with a sliding window too"
    yield "PyTorch returns all cached memory when vLLM wakes up, as TRL requests"
    if model.cache is None:
        yield "the size of a token in the cache is not known for this model, so the cache may hold no whole sequence"
