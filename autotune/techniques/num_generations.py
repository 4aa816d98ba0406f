"""``num_generations``: the number of completions per prompt, whose rewards are compared within the group."""

from __future__ import annotations

from autotune.techniques.base import SEVERAL, Effect, NumberTechnique, Option, TrainerFacts, differing
from autotune.techniques.trace_impact import SIZES


class NumGenerations(NumberTechnique):
    """A generation batch holds whole groups, so it is divisible by their size."""

    summary = "Number of completions per prompt."
    options = (
        Option(8, "TRL's default for GRPO"),
        Option(2, "TRL's default for RLOO; any number from 2 on", Effect.CHANGES_TRAINING, family=SEVERAL),
    )
    by_trainer = differing(rloo=TrainerFacts(default=2))
    changes = "the baseline of a reward is the mean of more or fewer completions"
    impact = SIZES
