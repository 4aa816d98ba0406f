"""``sp_size``: sequence parallelism of DeepSpeed (Ulysses), which is refused."""

from __future__ import annotations

from autotune.techniques.base import Option
from autotune.techniques.refused_size import RefusedSize

REFUSED = (
    "DeepSpeed gathers micro-batches from the other processes while it reads data, and splits attention by heads; "
    "neither is traced yet. context_parallel splits rows under fsdp2"
)
"""Why no plan has it (deepspeed 0.19, ``runtime/sequence_parallel/ulysses_sp.py``)."""


class SequenceParallelSize(RefusedSize):
    """``sp_size`` of accelerate's ``ParallelismConfig``."""

    name = "sp_size"
    summary = "Splits each row among this number of processes by DeepSpeed's Ulysses sequence parallelism."
    options = (Option(1, "each process has whole rows"), Option(2, "two processes to a row"))
    writes = frozenset({"args.parallelism_config.sp_size"})
    why = REFUSED


TECHNIQUE = SequenceParallelSize()
