"""``max_new_tokens``: online DPO's name of the maximum number of tokens to generate for a prompt."""

from __future__ import annotations

from autotune.techniques.base import POSITIVE, Effect, Option
from autotune.techniques.max_completion_length import MaxCompletionLength


class MaxNewTokens(MaxCompletionLength):
    """``max_completion_length`` under another name, with another default."""

    summary = "Maximum tokens of a completion: limits the time of generation and the micro-batch's length."
    options = (
        Option(64, "TRL's default"),
        Option(256, "any number of tokens", Effect.CHANGES_TRAINING, family=POSITIVE),
    )
