"""``beta``: the weight of the KL divergence from the reference model; 0 needs no reference model."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, NumberTechnique, Option, TrainerFacts, differing, real_number
from autotune.techniques.reference import SYNCHRONISED
from autotune.techniques.trace_impact import NO_PATCHES

_ALWAYS = "the loss always needs the reference, so memory and time do not change"


class Beta(NumberTechnique):
    """``beta``; at 0 there is neither a copy of the model, nor its pass over each generation batch."""

    summary = "Weight of the KL divergence from the reference model; 0 needs no reference model."
    options = (
        Option("0.0", "no reference: TRL's default for GRPO"),
        Option("0.05", "TRL's default for RLOO; any number", Effect.CHANGES_TRAINING),
    )
    by_trainer = differing(
        rloo=TrainerFacts(default="0.05"),
        **dict.fromkeys(("dpo", "kto", "online_dpo"), TrainerFacts(without_effect=_ALWAYS)),
        distillation=TrainerFacts(without_effect="it selects the divergence from the teacher; there is no reference"),
    )
    changes = "the loss weighs the divergence from the reference differently"
    impact = NO_PATCHES

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the number, spelled as Python does."""
        return real_number(self, text, "a number of at least 0", lambda weight: 0 <= weight < inf)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if the user's configuration synchronises a reference, and there is none."""
        if not float(choice) and setting.users_entry(SYNCHRONISED):
            return f"TRL refuses beta={choice} with sync_ref_model: there is no reference to synchronise"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.beta": float(choice)}
