"""``precision``: the type that weights are loaded in, and the type that matrix products run in."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.gpu import AMPERE
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, Option, Technique
from autotune.techniques.lora import has_adapters
from autotune.techniques.peft_config import trains_adapters_in_float32
from autotune.techniques.sharding import FSDP2
from autotune.techniques.trace_impact import TraceImpact

_BF16_WEIGHTS, _EXACT, _SCALED = "bfloat16", "float32", "float32+fp16"


class Precision(Technique):
    """The type of loaded weights, and mixed precision."""

    summary = "Data type of the weights and of matrix products."
    options = (
        Option("float32+bf16", "fp32 weights, bf16 products (autocast)"),
        # The other choices round its products.
        Option(_EXACT, "fp32 throughout", replaceable=False),
        Option(_SCALED, "fp32 weights, fp16 products with loss scaling", Effect.CHANGES_TRAINING),
        Option(_BF16_WEIGHTS, "bf16 weights, gradients and optimizer state", Effect.CHANGES_TRAINING),
    )
    needs = "compute capability 8.0 for bf16 on a GPU"
    changes = "bfloat16 weights lose small updates; float32+fp16 scales the loss and skips steps that overflow"
    writes = frozenset({"model.dtype", "args.bf16", "args.fp16"})
    impact = TraceImpact(patches_libraries=False, frees_weights=lambda choice: choice == _BF16_WEIGHTS)

    def effect(self, choice: Choice, candidate: Candidate, setting: Setting) -> Effect:
        """Return the effect; a frozen base is rounded to bf16 by autocast anyway, and its adapters train in fp32."""
        if choice == _BF16_WEIGHTS and trains_adapters_in_float32(candidate, setting):
            return Effect.EXACT
        return super().effect(choice, candidate, setting)

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason if the device does not compute in the type."""
        hardware = machine.hardware
        if choice == _SCALED and hardware.kind == "cpu":
            # Accelerator.__init__ sets neither autocast nor a scaler.
            return "with fp16, accelerate computes in float32 on a CPU"
        too_old = hardware.compute_capability is not None and hardware.compute_capability < AMPERE
        if "bf" in str(choice) and too_old:
            return "the GPU has no bf16 arithmetic (compute capability 8.0 or later), so PyTorch computes it in float32"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return the same reason, for a user's own configuration."""
        return self.unavailable(choice, setting.machine)

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`.

        Under mixed precision, accelerate casts weights that FSDP2 trains to float32 (accelerate 1.15,
        ``fsdp2_prepare_model``). Frozen bf16 weights with float32 adapters need mixed precision, and stay in bf16.
        """
        weights = choice == _BF16_WEIGHTS
        upcast = weights and candidate.get("sharding") == FSDP2 and not has_adapters(candidate)
        return {
            "model.dtype": _BF16_WEIGHTS if weights else "float32",
            "args.bf16": choice == "float32+bf16" or (weights and not upcast),
            "args.fp16": choice == _SCALED,
        }
