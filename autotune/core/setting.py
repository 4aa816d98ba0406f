"""The setting of a search: everything that a technique's rules may look at, beside the candidate itself."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.machine import Machine
from autotune.core.workload import Workload


@dataclass(frozen=True)
class Setting:
    """What stays the same for every candidate of a search.

    Attributes:
        global_batch_size: rows per optimizer step, over all processes.
        token_coverage: the share of dataset tokens, 0 to 1, that a candidate has to keep.
        allowed: knobs whose training-changing choices the user allowed by name.
    """

    workload: Workload
    machine: Machine
    global_batch_size: int
    token_coverage: float
    allowed: frozenset[str] = frozenset()

    @property
    def rows_per_process(self) -> int:
        """Rows of one optimizer step that one process handles."""
        return self.global_batch_size // self.machine.hardware.processes
