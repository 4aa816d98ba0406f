"""``tp_size``: tensor parallelism, which is refused."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import Option, Technique

REFUSED = (
    "accelerate refuses a model that was loaded whole, as TRL loads it; transformers can split matrices while it loads "
    "weights (tp_size in model_init_kwargs), and a trace builds models without loading any"
)
"""Why no plan has it (accelerate 1.15, ``Accelerator.prepare_model``; transformers 5.23, ``from_pretrained``)."""


class TensorParallelSize(Technique):
    """``tp_size`` of accelerate's ``ParallelismConfig``."""

    name = "tp_size"
    summary = "Splits the matrices of every layer among so many processes."
    options = (Option(1, "each process computes with whole matrices"), Option(2, "two processes to a matrix"))
    trl_default = 1
    needs = "what no plan has: it is refused with the reason"
    writes = frozenset({"args.parallelism_config.tp_size"})
    also_sizes = True

    def matters(self, setting: Setting) -> bool:
        """It is never searched."""
        return False

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return the reason, for any choice but the default."""
        return REFUSED if choice != 1 else None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.parallelism_config.tp_size": int(choice)} if choice != 1 else {}


TECHNIQUE = TensorParallelSize()
