"""``activation_offloading``: activations kept in the host's memory between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Option, Technique
from autotune.techniques.gradient_checkpointing import OFFLOAD
from autotune.techniques.sharding import DDP

_ZERO3 = "zero3"


class ActivationOffloading(Technique):
    """TRL's activation offloading (``trl/models/activation_offloading.py``)."""

    name = "activation_offloading"
    summary = "Moves activations to the host's memory during forward and back during backward."
    options = (
        Option(OFF, "activations stay on the device"),
        Option(ON, "activations go to pinned host memory"),
    )
    trl_default = OFF
    needs = "an accelerator, and host memory for the activations"
    writes = frozenset({"args.activation_offloading"})
    restricted: ClassVar[Mapping[tuple[str, Choice], str]] = {
        (trainer, ON): f"not with sharding={_ZERO3}, where the backward pass of {name}'s fused head fails: it gets a "
        "tensor back in place of its weight, which DeepSpeed cannot gather"
        for trainer, name in {"sft": "SFTTrainer", "dpo": "DPOTrainer", "kto": "KTOTrainer"}.items()
    }
    only_layers = True
    patches_libraries = False

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason on a CPU, where TRL 1.16 fails for lack of an accelerator."""
        if choice == ON and machine.hardware.kind == "cpu":
            return "it moves activations from an accelerator to the host, and there is no accelerator"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason where checkpointing offloads too, or training fails."""
        if choice == ON and candidate["gradient_checkpointing"] == OFFLOAD:
            # Both mechanisms would handle the same tensors.
            return "gradient_checkpointing=offload moves the same activations already"
        return self.failure(choice, candidate, setting)

    def failure(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason where ZeRO-3 shares the weight of a fused head out.

        The backward pass of TRL's fused head (``trl/kernels/chunked_logprob.py``) gathers its weight by what DeepSpeed
        notes on the parameter. PyTorch's hooks on saved tensors, by which activations are offloaded, hand it another
        tensor of the same data, on which nothing is noted.
        """
        fused = (setting.workload.trainer, choice) in self.restricted
        if not fused or candidate.get("sharding", DDP) != _ZERO3:
            return None
        return (
            f"TRL's fused head fails with sharding={_ZERO3} beside it: its backward pass gets a tensor back in place of"
            " its weight, which DeepSpeed cannot gather"
        )

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.activation_offloading": choice == ON}


TECHNIQUE = ActivationOffloading()
