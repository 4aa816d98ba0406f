"""``beta``: the weight of the divergence from the reference, which decides whether there is a reference at all."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import ClassVar

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques.base import Effect, Option, Technique

_ALWAYS = "any value needs the same memory and time: the reference is part of the loss"


class Beta(Technique):
    """Without it there is no reference: neither a copy of the model, nor a pass over each generation batch."""

    name = "beta"
    summary = "Weight of the divergence from a reference; 0 needs no reference model and no pass through it."
    options = (
        Option("0.0", "no reference: TRL's default for GRPO"),
        Option("0.05", "TRL's default for RLOO; any number", Effect.CHANGES_TRAINING),
    )
    trl_default = "0.0"
    trl_defaults: ClassVar[Mapping[str, Choice]] = {"rloo": "0.05"}
    writes = frozenset({"args.beta"})
    without_effect: ClassVar[Mapping[str, str]] = {"dpo": _ALWAYS, "kto": _ALWAYS, "online_dpo": _ALWAYS}
    changes = "the loss holds the model closer to the reference, or not at all"
    patches_libraries = False

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the number, spelled as Python does."""
        try:
            weight = float(text)
        except ValueError:
            weight = -1.0
        if not isfinite(weight) or weight < 0:
            raise InputError(f"{text!r} is no choice of {self.name}.", hint="It takes a number from 0 on.")
        return str(weight)

    def effect(self, choice: Choice, candidate: Candidate, setting: Setting) -> Effect:
        """Any other value than TRL's changes the loss."""
        return Effect.EXACT if choice == self.default(setting) else Effect.CHANGES_TRAINING

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.beta": float(choice)}


TECHNIQUE = Beta()
