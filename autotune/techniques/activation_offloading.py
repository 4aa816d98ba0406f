"""``activation_offloading``: activations kept in the host's memory between forward and backward."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Option, Technique
from autotune.techniques.gradient_checkpointing import OFFLOAD
from autotune.techniques.trace_impact import Scope, TraceImpact


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
    impact = TraceImpact(Scope.LAYERS, patches_libraries=False)

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason on a CPU, where TRL 1.16 fails for lack of an accelerator."""
        if choice == ON and machine.hardware.kind == "cpu":
            return "it moves activations from an accelerator to the host, and there is no accelerator"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason where checkpointing offloads too: both mechanisms would handle the same tensors."""
        if choice == ON and candidate["gradient_checkpointing"] == OFFLOAD:
            return "gradient_checkpointing=offload moves the same activations already"
        return None


TECHNIQUE = ActivationOffloading()
