"""``max_completion_length``: the maximum number of tokens to generate for a prompt."""

from __future__ import annotations

from autotune.techniques.base import POSITIVE, Effect, NumberTechnique, Option
from autotune.techniques.trace_impact import GROWING_SIZES


class MaxCompletionLength(NumberTechnique):
    """Longer completions are cut, which changes their rewards; the worst case has only completions of this length."""

    summary = "Maximum tokens of a completion: limits the key-value cache and the micro-batch's length."
    options = (
        Option(512, "TRL's default"),
        Option(256, "any number of tokens", Effect.CHANGES_TRAINING, family=POSITIVE),
    )
    changes = "longer completions are cut, and rewarded after the cut"
    impact = GROWING_SIZES
