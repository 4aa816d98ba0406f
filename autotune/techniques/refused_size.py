"""Sizes of accelerate's ``ParallelismConfig`` that autotune can neither plan nor probe yet, and so refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import Technique
from autotune.techniques.trace_impact import TraceImpact


class RefusedSize(Technique):
    """A size that is refused wherever it is not 1; subclasses say which and why.

    Attributes:
        why: the reason, which follows a colon.
    """

    trl_default = 1
    needs = "support by autotune, which it does not have yet: it is refused with the reason"
    impact = TraceImpact(sizes=True)
    why: ClassVar[str]

    def matters(self, setting: Setting) -> bool:
        """It is never searched."""
        return False

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return the reason, for any choice but the default."""
        return self.why if choice != 1 else None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        (entry,) = self.writes
        return {entry: int(choice)} if choice != 1 else {}
