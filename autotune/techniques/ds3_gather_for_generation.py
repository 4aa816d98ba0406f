"""``ds3_gather_for_generation``: whether ZeRO-3 gathers all weights on each GPU before completions are generated."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Distributed, Option, TrainerFacts, differing
from autotune.techniques.trace_impact import TraceImpact
from autotune.techniques.vllm import NAME as VLLM

_ZERO3 = "zero3"


class GatherForGeneration(Distributed):
    """``ds3_gather_for_generation``, which has no effect without DeepSpeed's ZeRO stage 3."""

    summary = "Gathers ZeRO-3's weights before generation; off: layer by layer for each token."
    options = (
        Option(ON, "all weights at once, which must fit on the GPU", entries={}),
        Option(OFF, "layer by layer: little memory, but slow"),
    )
    needs = f"sharding={_ZERO3}, and generation without vLLM"
    # Weights are gathered layer by layer.
    impact = TraceImpact(patches_libraries=False, frees_weights=lambda choice: choice == OFF)
    by_trainer = differing(
        rloo=TrainerFacts(
            restricted={OFF: "a model with an untied output head fails in DeepSpeed (tracing error at step 0)"}
        )
    )

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason if weights are not sharded."""
        if choice == OFF and machine.hardware.processes == 1:
            return "one device holds all weights; only DeepSpeed's ZeRO-3 shards them, over several"
        return None

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return ``on`` if generation uses no sharded weights.

        For vLLM, TRL always gathers the weights and sends them, regardless of the field
        (``trl/generation/vllm_generation.py``).
        """
        return choice if candidate.get("sharding") == _ZERO3 and candidate.get(VLLM, OFF) == OFF else ON
