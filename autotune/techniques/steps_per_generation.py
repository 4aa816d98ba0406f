"""``steps_per_generation``: micro-batches whose completions are generated at once."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques.base import Option, Technique
from autotune.techniques.per_device_train_batch_size import rows_per_step
from autotune.techniques.trace_impact import SIZES

NAME = "steps_per_generation"
WHOLE = "step"
_ONE_PART = "step/1"
_FIELD = "args.steps_per_generation"
_PART = re.compile(r"step/([1-9]\d*)")


class StepsPerGeneration(Technique):
    """Generating all completions of an optimizer step at once is fastest, and their key-value cache the largest."""

    name = NAME
    summary = "Generates the completions of a whole optimizer step at once, or in parts, whose cache is smaller."
    options = (
        Option(WHOLE, "all completions of an optimizer step at once: TRL's default"),
        Option("step/2", "in 2 parts (any number)"),
    )
    trl_default = WHOLE
    writes = frozenset({_FIELD})
    impact = SIZES

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the spelling."""
        if _PART.fullmatch(str(text)) is None and text != WHOLE:
            hint = "It takes step or step/N: more would train on completions of an earlier model."
            raise InputError(f"{text!r} is no choice of {self.name}.", hint=hint)
        return str(text)

    def spellings(self, entries: Mapping[str, object], candidate: Candidate, setting: Setting) -> tuple[Choice, ...]:
        """Return the part of an optimizer step that a number of micro-batches is."""
        of_part, micro_batches = entries.get(_FIELD), _micro_batches(candidate, setting)
        if not isinstance(of_part, int) or of_part < 1 or micro_batches % of_part:
            return ()
        return (f"{WHOLE}/{micro_batches // of_part}",)

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return the whole for a single part, or the other way round where the user's configuration has its number."""
        if choice not in (WHOLE, _ONE_PART):
            return choice
        return _ONE_PART if setting.users_own(self.name, _ONE_PART) else WHOLE

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason where the micro-batches of a step cannot be divided into so many parts."""
        micro_batches, parts = _micro_batches(candidate, setting), _parts(choice)
        if micro_batches % parts == 0:
            return None
        return f"{micro_batches} micro-batches of an optimizer step cannot be divided into {parts} parts"

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the micro-batches of a part; nothing for TRL's default."""
        if choice == WHOLE:
            return {}
        return {_FIELD: max(1, _micro_batches(candidate, setting) // _parts(choice))}


def _micro_batches(candidate: Candidate, setting: Setting) -> int:
    return rows_per_step(candidate, setting) // int(candidate["per_device_train_batch_size"])


def _parts(choice: Choice) -> int:
    found = _PART.fullmatch(str(choice))
    return int(found.group(1)) if found else 1
