"""``pad_to_multiple_of``: padding of micro-batches to lengths that match the hardware's tiles."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import SEVERAL, CrashReason, Option, Technique
from autotune.techniques.max_length import is_unlimited
from autotune.techniques.trace_impact import SIZES

NAME = "pad_to_multiple_of"
NONE = "none"
_ROUNDED = ("messages", "text", "prompt")
"""Formats of rows with images whose lengths TRL rounds up."""


def multiple_of(candidate: Candidate) -> int:
    """Return the number of tokens of which a candidate pads micro-batches to a multiple; 1 without rounding."""
    choice = candidate.get(NAME, NONE)
    return 1 if choice == NONE else int(choice)


class PadToMultipleOf(Technique):
    """Padding of the collated length beyond the longest row."""

    summary = "Rounds up the length of a micro-batch, for faster matrix products and fewer shapes."
    options = (
        Option(NONE, "no rounding"),
        Option(8, "any number of tokens above 1", family=SEVERAL),
        Option(64, "any number of tokens"),
    )
    impact = SIZES

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for rows with images that have a prompt and a completion."""
        workload = setting.workload
        if choice == self.trl_default or not workload.has_images or workload.dataset.format in _ROUNDED:
            return None
        return "TRL's collator of prompts and completions with images does not round lengths up"

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if rows with images have a maximum length that is no multiple."""
        # Prompts for generation are not cut.
        length = int(candidate.get("max_length", 0))
        if choice == self.trl_default or not setting.workload.has_images or is_unlimited(length, candidate, setting):
            return None
        if not length % int(choice):
            return None
        # The tokenizer truncates and pads these rows in one call, and refuses such a length.
        return CrashReason(f"max_length={length} is not a multiple of {choice}, which fails with images")
