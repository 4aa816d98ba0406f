"""``steps_per_generation``: the number of micro-batches whose completions are generated at once."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Effect, Option, Technique
from autotune.techniques.per_device_train_batch_size import rows_per_step
from autotune.techniques.trace_impact import SIZES
from autotune.units import plural

NAME = "steps_per_generation"
WHOLE = "step"
_ONE_PART = "step/1"
_FIELD = "args.steps_per_generation"
_PART = re.compile(r"step/([1-9]\d*)")
_SEVERAL = re.compile(r"step\*([2-9]|[1-9]\d+)")


class StepsPerGeneration(Technique):
    """Generating all completions of an optimizer step at once is fastest, but needs the largest key-value cache."""

    summary = "Generates an optimizer step's completions at once, or in parts with a smaller key-value cache."
    options = (
        Option(WHOLE, "all completions of an optimizer step at once: TRL's default"),
        Option("step/2", "in 2 parts (any number)", family=_PART),
        Option("step*2", "completions of 2 steps at once (any number)", Effect.CHANGES_TRAINING, family=_SEVERAL),
    )
    writes = frozenset({_FIELD})
    changes = "later steps are off-policy"
    impact = SIZES

    def spellings(self, entries: Mapping[str, object], candidate: Candidate, setting: Setting) -> tuple[Choice, ...]:
        """Return the choice for a number of micro-batches: a part of an optimizer step, or several steps."""
        together, micro_batches = entries.get(_FIELD), _micro_batches(candidate, setting)
        if not isinstance(together, int) or together < 1:
            return ()
        if micro_batches % together == 0:
            return (f"{WHOLE}/{micro_batches // together}",)
        return (f"{WHOLE}*{together // micro_batches}",) if together % micro_batches == 0 else ()

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Merge ``step`` with a single part; the one with a number is kept if the user's configuration sets it."""
        if choice not in (WHOLE, _ONE_PART):
            return choice
        return _ONE_PART if setting.is_users_choice(self.name, _ONE_PART) else WHOLE

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if the micro-batches of a step cannot be divided into so many parts."""
        micro_batches, parts = _micro_batches(candidate, setting), _parts(choice)
        if micro_batches % parts == 0:
            return None
        together = plural(micro_batches, "micro-batch", "micro-batches")
        return f"{together} of an optimizer step cannot be divided into {parts} parts"

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the micro-batches of a part or of several steps; nothing for TRL's default."""
        if choice == WHOLE:
            return {}
        several, micro_batches = _SEVERAL.fullmatch(str(choice)), _micro_batches(candidate, setting)
        return {_FIELD: micro_batches * int(several[1]) if several else max(1, micro_batches // _parts(choice))}


def _micro_batches(candidate: Candidate, setting: Setting) -> int:
    return rows_per_step(candidate, setting) // int(candidate["per_device_train_batch_size"])


def _parts(choice: Choice) -> int:
    match = _PART.fullmatch(str(choice))
    return int(match.group(1)) if match else 1
