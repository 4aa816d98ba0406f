"""``sp_size``: sequence parallelism of DeepSpeed (Ulysses), which is refused."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import Option, Technique

REFUSED = (
    "DeepSpeed gathers micro-batches from the other processes while it reads data, and splits attention by heads; "
    "neither is traced yet. context_parallel splits rows under fsdp2"
)
"""Why no plan has it (deepspeed 0.19, ``runtime/sequence_parallel/ulysses_sp.py``)."""


class SequenceParallelSize(Technique):
    """``sp_size`` of accelerate's ``ParallelismConfig``."""

    name = "sp_size"
    summary = "Splits each row among so many processes, which exchange heads for tokens around attention."
    options = (Option(1, "each process has whole rows"), Option(2, "two processes to a row"))
    trl_default = 1
    needs = "what no plan has: it is refused with the reason"
    writes = frozenset({"args.parallelism_config.sp_size"})
    also_sizes = True

    def matters(self, setting: Setting) -> bool:
        """It is never searched."""
        return False

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return the reason, for any choice but the default."""
        return REFUSED if choice != 1 else None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.parallelism_config.sp_size": int(choice)} if choice != 1 else {}


TECHNIQUE = SequenceParallelSize()
