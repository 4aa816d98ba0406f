"""``quantization``: a frozen model in 8 or 4 bits, with trained adapters."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques import lora
from autotune.techniques.base import Effect, Equipped, Option
from autotune.techniques.trace_impact import NO_PATCHES

NONE = "none"
_NF4 = {"model.load_in_4bit": True, "model.bnb_4bit_quant_type": "nf4"}


class Quantization(Equipped):
    """bitsandbytes' quantised linear modules, set through the fields of ``trl.ModelConfig``."""

    summary = "Stores the frozen weights in 8 or 4 bits and dequantises them for each use."
    options = (
        Option(NONE, "weights in their loaded type", entries={}),
        Option("8bit", "LLM.int8()", Effect.CHANGES_TRAINING, entries={"model.load_in_8bit": True}),
        Option("4bit-nf4", "4-bit NormalFloat (QLoRA)", Effect.CHANGES_TRAINING, entries=_NF4),
    )
    package = "bitsandbytes"
    needs = "the package bitsandbytes, and lora or peft_config"
    changes = "the frozen weights are rounded to 8 or 4 bits"
    writes = frozenset({"model.load_in_8bit", *_NF4})
    impact = NO_PATCHES

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason without adapters: quantised weights get no gradients (transformers refuses to train them)."""
        if choice != NONE and not lora.has_adapters(candidate):
            return f"quantization={choice} freezes the model; it needs lora or peft_config"
        return None
