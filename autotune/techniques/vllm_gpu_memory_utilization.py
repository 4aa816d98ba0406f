"""``vllm_gpu_memory_utilization``: the share of the GPU's memory that vLLM reserves."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Option, TrainerFacts, differing, real_number
from autotune.techniques.vllm import VllmSize, is_colocated


class VllmGpuMemoryUtilization(VllmSize):
    """It covers vLLM's weights, activations, CUDA graphs and key-value cache, which takes the remainder."""

    summary = "Share of the GPU that vLLM reserves for weights, activations and key-value cache."
    options = (
        Option("0.3", "TRL's default for GRPO, RLOO and distillation"),
        Option("0.5", "any share between 0 and 1"),
    )
    by_trainer = differing(online_dpo=TrainerFacts(default="0.55"))

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the share, spelled as Python does."""
        return real_number(self, text, "a share between 0 and 1", lambda share: 0 < share < 1)

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return no entry where vLLM has no part of this GPU."""
        return {"args.vllm_gpu_memory_utilization": float(choice)} if is_colocated(candidate) else {}
