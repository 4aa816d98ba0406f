"""``num_generations``: completions of each prompt, whose rewards are compared with one another."""

from __future__ import annotations

from autotune.techniques.base import SEVERAL, Effect, NumberTechnique, Option, TrainerFacts, differing
from autotune.techniques.trace_impact import SIZES


class NumGenerations(NumberTechnique):
    """A generation batch holds whole groups, so it is divisible by their size."""

    name = "num_generations"
    summary = "Completions of each prompt; a generation batch holds all of a prompt's."
    options = (
        Option(8, "TRL's default for GRPO"),
        Option(2, "TRL's default for RLOO; any number from 2 on", Effect.CHANGES_TRAINING, family=SEVERAL),
    )
    by_trainer = differing(rloo=TrainerFacts(default=2))
    writes = frozenset({"args.num_generations"})
    changes = "the baseline that a reward is compared with is the mean of more or fewer completions"
    impact = SIZES
