"""``vllm_tensor_parallel_size``: GPUs that share one vLLM engine."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile
from autotune.techniques.base import POSITIVE, CrashReason, Option, TrainerFacts, UnsearchedReason, differing
from autotune.techniques.vllm import SizeOfVllm, is_colocated
from autotune.units import counted


class VllmTensorParallelSize(SizeOfVllm):
    """Each GPU then holds a part of vLLM's weights and key-value cache, and the prompts of all of them are generated
    for together.
    """

    name = "vllm_tensor_parallel_size"
    summary = "Divides vLLM's weights and key-value cache among so many of the training's GPUs."
    options = (
        Option(1, "each GPU has an engine of its own: TRL's default", entries={}),
        Option(2, "any divisor of the GPUs", family=POSITIVE),
    )
    needs = f"{SizeOfVllm.needs}, and a number of GPUs that it divides"
    writes = frozenset({"args.vllm_tensor_parallel_size"})
    # `_generate_vllm_colocate` gives each process its own prompts, and all engines of a group have to have the same.
    by_trainer = differing(
        online_dpo=TrainerFacts(ignored={2: "TRL does not gather the prompts of the processes that share vLLM"})
    )

    def matters(self, setting: Setting) -> bool:
        """Return whether vLLM may be used, and there are several processes to share it."""
        return super().matters(setting) and setting.machine.hardware.processes > 1

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason where it does not divide the GPUs of the training, as TRL demands, or the heads, as vLLM.

        TRL groups successive processes (``VLLMGeneration._init_vllm``), which may be in different machines.
        """
        launch = setting.machine.hardware.launch
        if launch.processes % int(choice):
            return CrashReason(f"TRL demands that it divides the {counted(launch.processes, 'process', 'processes')}")
        if launch.per_machine % int(choice):
            held = counted(launch.per_machine, "GPU")
            return UnsearchedReason(f"an engine over several machines is not planned: each has {held}")
        return undivided(setting.workload.model, int(choice))

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return the same reason, for a configuration of the user's own."""
        return self.unsuitable(choice, setting) if is_colocated(candidate) else None


def undivided(model: ModelProfile, gpus: int) -> str | None:
    """Return why vLLM cannot share out the heads, or None if it can.

    It shares out those of queries (``vllm/config/model.py``), and those of keys and values, of which several GPUs hold
    the same one if there are fewer than GPUs (``vllm/model_executor/models/llama.py``, ``LlamaAttention``).
    """
    heads, cached = model.attention_heads, model.cache.heads if model.cache is not None else 1
    if heads and heads % gpus:
        return CrashReason(f"vLLM cannot share {heads} attention heads out among {gpus} GPUs")
    if max(cached, gpus) % min(cached, gpus):
        return CrashReason(f"vLLM cannot share {cached} heads of keys and values out among {gpus} GPUs")
    return None
