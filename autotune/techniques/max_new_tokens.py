"""``max_new_tokens``: the most tokens that the model may generate for a prompt, in the words of online DPO."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, NumberTechnique, Option


class MaxNewTokens(NumberTechnique):
    """Longer completions are cut, which changes their rewards; the worst case has only completions of this length."""

    name = "max_new_tokens"
    summary = "Most tokens of a completion: bounds what generation takes, and the width of every micro-batch."
    options = (
        Option(64, "TRL's default"),
        Option(256, "any number of tokens", Effect.CHANGES_TRAINING),
    )
    trl_default = 64
    writes = frozenset({"args.max_new_tokens"})
    changes = "longer completions are cut, and rewarded as they are then"
    ordered = True
    only_sizes = True
    patches_libraries = False
    unit = "tokens"

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.max_new_tokens": int(choice)}


TECHNIQUE = MaxNewTokens()
