"""``gradient_checkpointing``: activations computed again in the backward pass, instead of kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Option, Technique
from autotune.techniques.versions import installed

SELECTIVE = "selective"
OFFLOAD = "offload"
_EVERY = re.compile(r"every_(\d+)")
# `every_n_layers` and `offload` came with transformers 5.23's activation checkpointing.
_TRANSFORMERS_WITH_KEYS = ">=5.23"
# `selective` came with TRL 1.15.
_TRL_WITH_SELECTIVE = ">=1.15"


class GradientCheckpointing(Technique):
    """Activation checkpointing, by transformers and TRL."""

    name = "gradient_checkpointing"
    summary = "Keeps fewer activations and computes them again in the backward pass."
    options = (
        Option(OFF, "keeps all activations"),
        Option(ON, "keeps the input of every layer"),
        Option("every_2", "checkpoints every second layer only (every_N)"),
        Option(SELECTIVE, "as on, and keeps the outputs of attention"),
        Option(OFFLOAD, "as on, and moves what is kept to the host's memory"),
    )
    trl_default = ON
    needs = "offload: an accelerator; every_N and offload: transformers 5.23 or later"
    writes = frozenset({"args.gradient_checkpointing", "args.gradient_checkpointing_kwargs"})
    refused: ClassVar[Mapping[tuple[str, Choice], str]] = {
        ("dpo", SELECTIVE): "DPOTrainer leaves its key to PyTorch, which refuses it",
    }
    patches_libraries = False

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the choice, ``every_N`` for any N above one included."""
        every = _EVERY.fullmatch(str(text))
        return str(text) if every and int(every.group(1)) > 1 else super().parse(text)

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Some of its keys came late, and offloading pins host memory, which only an accelerator's driver does."""
        if choice == OFFLOAD and machine.hardware.kind == "cpu":
            return "offloading moves activations from an accelerator to the host, and there is no accelerator"
        late = choice == OFFLOAD or _EVERY.fullmatch(str(choice))
        if late and not installed(machine, "transformers", _TRANSFORMERS_WITH_KEYS):
            return f"{choice} needs transformers 5.23 or later"
        if choice == SELECTIVE and not installed(machine, "trl", _TRL_WITH_SELECTIVE):
            return "selective needs trl 1.15 or later"
        return None

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Every n-th layer needs n layers."""
        every = _EVERY.fullmatch(str(choice))
        layers = setting.workload.model.layers
        if every and int(every.group(1)) > layers:
            return f"{choice} checkpoints no layer of a model with {layers}"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """On a model with adapters, transformers 5.23 no longer calls what TRL wraps to take its key out."""
        renamed = installed(setting.machine, "transformers", _TRANSFORMERS_WITH_KEYS)
        if choice == SELECTIVE and candidate["lora"] != "none" and renamed:
            return "TRL does not take its key selective from a model with adapters, and PyTorch refuses it"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        every = _EVERY.fullmatch(str(choice))
        if every:
            return self._with({"every_n_layers": int(every.group(1))})
        if choice in (SELECTIVE, OFFLOAD):
            return self._with({str(choice): True})
        return {"args.gradient_checkpointing": choice == ON}

    def layer_period(self, plan: TrainingPlan) -> int:
        """Every n-th layer repeats after n."""
        keys = plan.args.get("gradient_checkpointing_kwargs")
        every = keys.get("every_n_layers") if isinstance(keys, Mapping) else None
        return every if isinstance(every, int) else 1

    @staticmethod
    def _with(keys: Mapping[str, object]) -> Mapping[str, object]:
        return {"args.gradient_checkpointing": True, "args.gradient_checkpointing_kwargs": dict(keys)}


TECHNIQUE = GradientCheckpointing()
