"""``num_iterations``: how often the same completions are trained on."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, NumberTechnique, Option


class NumIterations(NumberTechnique):
    """Fewer generations for as many updates; all but the first update are on completions of an earlier model."""

    name = "num_iterations"
    summary = "Number of updates on the same completions, which share the time to generate them."
    options = (
        Option(1, "TRL's default: each completion is trained on once"),
        Option(2, "any number", Effect.CHANGES_TRAINING),
    )
    trl_default = 1
    writes = frozenset({"args.num_iterations"})
    changes = "completions are trained on again after the model that generated them has changed"
    also_sizes = True
    patches_libraries = False
    unit = "iterations"

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.num_iterations": int(choice)}


TECHNIQUE = NumIterations()
