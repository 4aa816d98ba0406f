"""``hub_kernels``: kernels of the Hugging Face Hub in place of a model's layers."""

from __future__ import annotations

from autotune.techniques.base import OFF, ON, Equipped, Option
from autotune.techniques.trace_impact import TraceImpact


class HubKernels(Equipped):
    """``use_kernels`` of ``from_pretrained``."""

    summary = "Replaces layers by fused kernels from the Hub, which are downloaded at first use."
    options = (
        # Older releases of transformers do not accept the argument.
        Option(OFF, "the model's own layers", entries={}),
        Option(ON, "kernels from the Hub, for layers that they match"),
    )
    without_gpu = "its kernels are for CUDA GPUs"
    package = "kernels"
    impact = TraceImpact(unplanned="its effect: a trace runs the model's own layers")
    needs = "the package kernels, a CUDA GPU, and the network at first use"
    writes = frozenset({"args.model_init_kwargs.use_kernels"})
