"""``pad_to_multiple_of``: lengths that suit the hardware's tiles."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques.base import Option, Technique


class PadToMultipleOf(Technique):
    """Padding of the collated length beyond the longest row."""

    name = "pad_to_multiple_of"
    summary = "Rounds the length of a micro-batch up, which suits the tiles of matrix units and repeats shapes."
    options = (
        Option("none", "no rounding"),
        Option(8, "any number of tokens"),
        Option(64, "any number of tokens"),
    )
    trl_default = "none"
    writes = frozenset({"args.pad_to_multiple_of"})
    only_sizes = True
    patches_libraries = False

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return ``none`` or a number of tokens above one."""
        if str(text) == "none":
            return "none"
        if str(text).isdigit() and int(text) > 1:
            return int(text)
        raise InputError(f"{text!r} is no choice of {self.name}.", hint="It takes none, or a number of tokens above 1.")

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.pad_to_multiple_of": None if choice == "none" else choice}


TECHNIQUE = PadToMultipleOf()
