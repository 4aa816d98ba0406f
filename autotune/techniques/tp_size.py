"""``tp_size``: tensor parallelism, which is refused."""

from __future__ import annotations

from autotune.techniques.base import Option
from autotune.techniques.refused_size import RefusedSize

REFUSED = (
    "accelerate refuses a model that was loaded whole, as TRL loads it; transformers can split matrices while it loads "
    "weights (tp_size in model_init_kwargs), and a trace builds models without loading any"
)
"""Why no plan has it (accelerate 1.15, ``Accelerator.prepare_model``; transformers 5.23, ``from_pretrained``)."""


class TensorParallelSize(RefusedSize):
    """``tp_size`` of accelerate's ``ParallelismConfig``."""

    name = "tp_size"
    summary = "Tensor parallelism: splits the matrices of every layer among this number of processes."
    options = (Option(1, "each process computes with whole matrices"), Option(2, "two processes to a matrix"))
    writes = frozenset({"args.parallelism_config.tp_size"})
    why = REFUSED


TECHNIQUE = TensorParallelSize()
