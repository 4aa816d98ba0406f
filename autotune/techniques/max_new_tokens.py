"""``max_new_tokens``: the most tokens that the model may generate for a prompt, in the words of online DPO."""

from __future__ import annotations

from autotune.techniques.base import POSITIVE, Effect, Option
from autotune.techniques.max_completion_length import MaxCompletionLength


class MaxNewTokens(MaxCompletionLength):
    """``max_completion_length`` by another name, and with another default."""

    name = "max_new_tokens"
    summary = "Most tokens of a completion: bounds what generation takes, and the width of every micro-batch."
    options = (
        Option(64, "TRL's default"),
        Option(256, "any number of tokens", Effect.CHANGES_TRAINING, family=POSITIVE),
    )
    writes = frozenset({"args.max_new_tokens"})
