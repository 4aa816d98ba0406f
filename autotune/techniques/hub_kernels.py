"""``hub_kernels``: kernels of the Hugging Face Hub in place of a model's layers."""

from __future__ import annotations

from autotune.core.candidate import Choice
from autotune.core.machine import Machine
from autotune.techniques.base import OFF, ON, Equipped, Option
from autotune.techniques.trace_impact import TraceImpact
from autotune.techniques.versions import installed, missing, required_by


def kernels_missing(machine: Machine) -> str | None:
    """Return why transformers cannot load kernels of the Hub here, or None if it can."""
    versions = required_by("transformers", "kernels")
    if installed(machine, "kernels", versions):
        return None
    return missing("kernels", machine) or f"the installed transformers takes kernels {versions} only"


class HubKernels(Equipped):
    """``use_kernels`` of ``from_pretrained``."""

    name = "hub_kernels"
    summary = "Replaces layers by fused kernels of the Hub, which are fetched at first use."
    options = (
        # Older releases do not accept the argument.
        Option(OFF, "the model's own layers", written=False),
        Option(ON, "kernels of the Hub, where they fit"),
    )
    trl_default = OFF
    without_gpu = "its kernels are for CUDA GPUs"
    impact = TraceImpact(unplanned="all of it: kernels come over the network, and a trace runs the model's own layers")
    needs = "the package kernels, a CUDA GPU, and the network at first use"
    writes = frozenset({"args.model_init_kwargs.use_kernels"})

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason without a GPU, or of :func:`kernels_missing`."""
        return super().unavailable(choice, machine) or (kernels_missing(machine) if choice == ON else None)
