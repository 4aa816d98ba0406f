"""``gradient_checkpointing``: activations recomputed in the backward pass instead of kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.techniques import lora
from autotune.techniques.base import OFF, ON, Option, Technique, TrainerFacts, differing
from autotune.techniques.reference import PRECOMPUTED
from autotune.techniques.trace_impact import PlanImpact, TraceImpact
from autotune.techniques.versions import installed

SELECTIVE = "selective"
OFFLOAD = "offload"
_EVERY_2 = "every_2"
_EVERY = re.compile(r"every_([2-9]|[1-9]\d+)")
# These releases skip the function in which TRL removes its key `selective`, on a model with adapters.
_TRANSFORMERS_WITHOUT_SELECTIVE = ">=5.23"
# These releases pass the key `offload` on to PyTorch, which refuses it.
_TRANSFORMERS_WITHOUT_OFFLOAD = "<5.17"

_NO_ACCELERATOR = "offloading moves activations from an accelerator to the host, and there is no accelerator"
_TO_PYTORCH = "TRL passes the key of this choice to PyTorch, which refuses it"
_WITH_REFERENCE = TrainerFacts(
    refused={SELECTIVE: _TO_PYTORCH},
    restricted=dict.fromkeys(
        (_EVERY_2, OFFLOAD), f"needs reference={PRECOMPUTED}: after a pass of the reference, {_TO_PYTORCH}"
    ),
)
_GENERATING = TrainerFacts(refused=dict.fromkeys((_EVERY_2, SELECTIVE, OFFLOAD), f"after a generation, {_TO_PYTORCH}"))


def period(plan: TrainingPlan) -> int:
    """Return n for ``every_n``, else 1."""
    every = plan.entry("args.gradient_checkpointing_kwargs.every_n_layers")
    return every if isinstance(every, int) else 1


def _impact_in(plan: TrainingPlan) -> PlanImpact:
    """Return the effect on the extrapolation: some layers' offloaded inputs are still on the device."""
    offloads = bool(plan.entry(f"args.gradient_checkpointing_kwargs.{OFFLOAD}"))
    return PlanImpact(layer_period=period(plan), edges=1 if offloads else 0)


class GradientCheckpointing(Technique):
    """Activation checkpointing of transformers and TRL."""

    summary = "Keeps fewer activations and recomputes the others in the backward pass."
    options = (
        Option(OFF, "keeps all activations"),
        Option(ON, "keeps the input of every layer"),
        Option(_EVERY_2, "checkpoints every second layer only (every_N)", family=_EVERY),
        Option(SELECTIVE, "as on, and keeps the outputs of attention"),
        Option(OFFLOAD, "as on, and moves the kept activations to the host's memory", without_gpu=_NO_ACCELERATOR),
    )
    trl_default = ON
    needs = "an accelerator for offload"
    writes = frozenset({"args.gradient_checkpointing", "args.gradient_checkpointing_kwargs"})
    by_trainer = differing(
        dpo=_WITH_REFERENCE,
        kto=_WITH_REFERENCE,
        reward=TrainerFacts(refused={SELECTIVE: _TO_PYTORCH}),
        grpo=_GENERATING,
        rloo=_GENERATING,
        distillation=_GENERATING,
        # OnlineDPOTrainer calls unwrap_model_for_generation (trl/models/utils.py) without keys.
        online_dpo=TrainerFacts(
            ignored=dict.fromkeys(
                (_EVERY_2, SELECTIVE, OFFLOAD),
                "after a generation, TRL enables checkpointing again without the key of this choice",
            )
        ),
    )
    impact = TraceImpact(patches_libraries=False, in_plan=_impact_in)

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason for offloading on a CPU, where memory cannot be pinned, or with an early transformers."""
        if choice == OFFLOAD and installed(machine, "transformers", _TRANSFORMERS_WITHOUT_OFFLOAD):
            return "transformers can offload checkpoints from version 5.17 on"
        return super().unavailable(choice, machine)

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for ``every_N`` on a model with fewer than N layers: it then checkpoints one layer."""
        every = _EVERY.fullmatch(str(choice))
        layers = setting.workload.model.layers
        if every and int(every.group(1)) > layers:
            return f"{choice} checkpoints only the first layer of a model with {layers}"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if a key of TRL or transformers reaches PyTorch, which refuses it.

        Around the reference's forward pass, TRL disables checkpointing and enables it again, passing all keys to
        PyTorch (``trl.models.utils.disable_gradient_checkpointing``). With adapters, transformers 5.23 skips the
        function in which TRL removes its own key.
        """
        late = choice == OFFLOAD or _EVERY.fullmatch(str(choice))
        if late and candidate.get("reference", PRECOMPUTED) != PRECOMPUTED:
            return (
                f"gradient_checkpointing={choice} needs reference={PRECOMPUTED}: after the reference's pass in a "
                f"micro-batch, {_TO_PYTORCH}"
            )
        if choice != SELECTIVE or not lora.has_adapters(candidate):
            return None
        if installed(setting.machine, "transformers", _TRANSFORMERS_WITHOUT_SELECTIVE):
            return f"with adapters, {_TO_PYTORCH}"
        if candidate.get("sharding") == "zero3":
            return "TRL refuses gradient_checkpointing=selective of adapters with sharding=zero3"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        if choice in (OFF, ON):
            return {"args.gradient_checkpointing": choice == ON}
        every = _EVERY.fullmatch(str(choice))
        keys = {"every_n_layers": int(every.group(1))} if every else {str(choice): True}
        return {"args.gradient_checkpointing": True, "args.gradient_checkpointing_kwargs": keys}
