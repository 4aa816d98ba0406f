"""``liger``: Liger's Triton kernels in place of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Equipped, Option
from autotune.techniques.trace_impact import Scope, TraceImpact


class Liger(Equipped):
    """``use_liger_kernel``. TRL 1.15 and later enable its layer kernels and disable its fused loss."""

    name = "liger"
    summary = "Replaces normalisation, rotary embedding and MLP by fused Triton kernels."
    options = (Option(OFF, "the model's own layers"), Option(ON, "Liger's layers, where it knows the architecture"))
    trl_default = OFF
    # Triton has no driver there.
    without_gpu = "its Triton kernels need a CUDA GPU"
    package = "liger-kernel"
    needs = "the package liger-kernel and a CUDA GPU"
    writes = frozenset({"args.use_liger_kernel", "args.liger_kernel_config"})
    impact = TraceImpact(Scope.LAYERS)

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.use_liger_kernel": choice == ON}
