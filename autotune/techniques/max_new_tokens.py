"""``max_new_tokens``: the most tokens that the model may generate for a prompt, in the words of online DPO."""

from __future__ import annotations

from autotune.techniques.base import POSITIVE, Effect, NumberTechnique, Option
from autotune.techniques.trace_impact import GROWING_SIZES


class MaxNewTokens(NumberTechnique):
    """Longer completions are cut, which changes their rewards; the worst case has only completions of this length."""

    name = "max_new_tokens"
    summary = "Most tokens of a completion: bounds what generation takes, and the width of every micro-batch."
    options = (
        Option(64, "TRL's default"),
        Option(256, "any number of tokens", Effect.CHANGES_TRAINING, family=POSITIVE),
    )
    writes = frozenset({"args.max_new_tokens"})
    changes = "longer completions are cut, and rewarded as they are then"
    impact = GROWING_SIZES
