"""``vllm_tensor_parallel_size``: GPUs that share one vLLM engine."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile
from autotune.techniques.base import POSITIVE, CrashReason, Option, TrainerFacts, UnsearchedReason, differing
from autotune.techniques.vllm import VllmSize, is_colocated
from autotune.units import plural


class VllmTensorParallelSize(VllmSize):
    """Each GPU holds a part of vLLM's weights and cache; the engine generates for the prompts of all its GPUs."""

    summary = "Shards vLLM across this number of the training's GPUs."
    options = (
        Option(1, "each GPU has its own engine: TRL's default", entries={}),
        Option(2, "any divisor of the GPUs", family=POSITIVE),
    )
    needs = f"{VllmSize.needs}, and a number of GPUs that it divides"
    # `_generate_vllm_colocate` passes each process's own prompts, but all ranks of an engine need the same.
    by_trainer = differing(
        online_dpo=TrainerFacts(ignored={2: "TRL does not gather the prompts of the processes that share vLLM"})
    )

    def matters(self, setting: Setting) -> bool:
        """Return whether vLLM may be used, and there are several processes to share it."""
        return super().matters(setting) and setting.machine.hardware.processes > 1

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason if it does not divide the training's GPUs, as TRL requires, or the heads, as vLLM requires.

        TRL groups successive processes (``VLLMGeneration._init_vllm``), which may be on different machines.
        """
        launch = setting.machine.hardware.launch
        if launch.processes % int(choice):
            return CrashReason(f"TRL requires that it divides the {plural(launch.processes, 'process', 'processes')}")
        if launch.per_machine % int(choice):
            held = plural(launch.per_machine, "GPU")
            return UnsearchedReason(f"an engine over several machines is not planned: each has {held}")
        return indivisible_heads(setting.workload.model, int(choice))

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return the same reason, for a configuration of the user's own."""
        return self.unsuitable(choice, setting) if is_colocated(candidate) else None


def indivisible_heads(model: ModelProfile, gpus: int) -> str | None:
    """Return why vLLM cannot shard the attention heads, or None if it can.

    It shards query heads (``vllm/config/model.py``) and key-value heads; if there are fewer of these than GPUs, it
    replicates them (``vllm/model_executor/models/llama.py``, ``LlamaAttention``).
    """
    heads, cached = model.attention_heads, model.cache.heads if model.cache is not None else 1
    if heads and heads % gpus:
        return CrashReason(f"vLLM cannot divide {heads} attention heads among {gpus} GPUs")
    if max(cached, gpus) % min(cached, gpus):
        return CrashReason(f"vLLM cannot divide {cached} heads of keys and values among {gpus} GPUs")
    return None
