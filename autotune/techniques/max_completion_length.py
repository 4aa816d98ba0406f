"""``max_completion_length``: the most tokens that the model may generate for a prompt."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, NumberTechnique, Option


class MaxCompletionLength(NumberTechnique):
    """Longer completions are cut, which changes their rewards; the worst case has only completions of this length."""

    name = "max_completion_length"
    summary = "Most tokens of a completion: bounds the key-value cache and the width of every micro-batch."
    options = (
        Option(512, "TRL's default"),
        Option(256, "any number of tokens", Effect.CHANGES_TRAINING),
    )
    trl_default = 512
    writes = frozenset({"args.max_completion_length"})
    changes = "longer completions are cut, and rewarded as they are then"
    ordered = True
    only_sizes = True
    patches_libraries = False
    unit = "tokens"

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.max_completion_length": int(choice)}


TECHNIQUE = MaxCompletionLength()
