"""``num_generations``: completions of each prompt, whose rewards are compared with one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, NumberTechnique, Option


class NumGenerations(NumberTechnique):
    """A generation batch holds whole groups, so it is divisible by their size."""

    name = "num_generations"
    summary = "Completions of each prompt; a generation batch holds all of a prompt's."
    options = (
        Option(8, "TRL's default for GRPO"),
        Option(2, "TRL's default for RLOO; any number from 2 on", Effect.CHANGES_TRAINING),
    )
    trl_default = 8
    trl_defaults: ClassVar[Mapping[str, Choice]] = {"rloo": 2}
    writes = frozenset({"args.num_generations"})
    changes = "the baseline that a reward is compared with is the mean of more or fewer completions"
    only_sizes = True
    patches_libraries = False
    unit = "completions"
    least = 2

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.num_generations": int(choice)}


TECHNIQUE = NumGenerations()
