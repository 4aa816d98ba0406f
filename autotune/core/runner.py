"""The one question of plans and searches: how much memory does a candidate need, and how fast is it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate


class Runner(Protocol):
    """Runs candidates of one problem and returns what each needs.

    Each result has memory, time, origin and error, or origin ``UNKNOWN`` and the reason. A candidate that was run
    before is not run again, nor is one whose training plan is the same.
    """

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the results of candidates in their normal form, in their order.

        Raises:
            AutotuneError: nothing can be run.
        """
