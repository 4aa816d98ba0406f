"""``pad_to_multiple_of``: lengths that suit the hardware's tiles."""

from __future__ import annotations

from autotune.techniques.base import SEVERAL, Option, Technique
from autotune.techniques.trace_impact import SIZES


class PadToMultipleOf(Technique):
    """Padding of the collated length beyond the longest row."""

    name = "pad_to_multiple_of"
    summary = "Rounds the length of a micro-batch up, which suits the tiles of matrix units and repeats shapes."
    options = (
        Option("none", "no rounding"),
        Option(8, "any number of tokens above 1", family=SEVERAL),
        Option(64, "any number of tokens"),
    )
    trl_default = "none"
    writes = frozenset({"args.pad_to_multiple_of"})
    impact = SIZES


TECHNIQUE = PadToMultipleOf()
