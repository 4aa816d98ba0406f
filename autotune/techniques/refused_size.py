"""Sizes of accelerate's ``ParallelismConfig`` that autotune can neither plan nor probe yet, and so refuses."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import Option, Technique
from autotune.techniques.trace_impact import TraceImpact

REFUSED: Mapping[str, str] = {
    # accelerate 1.15, ``Accelerator.prepare_model``; transformers 5.23, ``from_pretrained``.
    "tp_size": (
        "accelerate refuses a model that was loaded whole, as TRL loads it; transformers can split matrices while it "
        "loads weights (tp_size in model_init_kwargs), and a trace builds models without loading any"
    ),
    # deepspeed 0.19, ``runtime/sequence_parallel/ulysses_sp.py``.
    "sp_size": (
        "DeepSpeed gathers micro-batches from the other processes while it reads data, and splits attention by heads; "
        "neither is traced yet. context_parallel splits rows under fsdp2"
    ),
}
"""By size, the reason why no plan has it."""


class RefusedSize(Technique):
    """A size that is refused wherever it is not 1."""

    trl_default = 1
    needs = "support by autotune, which it does not have yet: it is refused with the reason"
    impact = TraceImpact(also_sets_sizes=True)

    def matters(self, setting: Setting) -> bool:
        """It is never searched."""
        return False

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return the reason, for any choice but the default."""
        return REFUSED[self.name] if choice != 1 else None


class TensorParallelSize(RefusedSize):
    """``tp_size``: tensor parallelism."""

    name = "tp_size"
    summary = "Tensor parallelism: splits the matrices of every layer among this number of processes."
    options = (
        Option(1, "each process computes with whole matrices", written=False),
        Option(2, "two processes to a matrix"),
    )
    writes = frozenset({"args.parallelism_config.tp_size"})


class SequenceParallelSize(RefusedSize):
    """``sp_size``: sequence parallelism of DeepSpeed (Ulysses)."""

    name = "sp_size"
    summary = "Splits each row among this number of processes by DeepSpeed's Ulysses sequence parallelism."
    options = (Option(1, "each process has whole rows", written=False), Option(2, "two processes to a row"))
    writes = frozenset({"args.parallelism_config.sp_size"})
