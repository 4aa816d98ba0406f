"""``torch_compile``: the model compiled by TorchInductor."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Option, Technique
from autotune.techniques.trace_impact import TraceImpact


class TorchCompile(Technique):
    """``torch_compile`` of ``TrainingArguments``. Not in the default space: compiling takes minutes per probe."""

    name = "torch_compile"
    summary = "Compiles the model, which fuses kernels and takes minutes whenever shapes are new."
    options = (Option(OFF, "runs as written"), Option(ON, "compiled by TorchInductor"))
    impact = TraceImpact(
        unplanned="the speed of compiled code, and the memory that fusing saves: a trace runs the step as written"
    )
    needs = "a C++ compiler"
    # A backend or a mode switches it on as well (TrainingArguments.__post_init__).
    writes = frozenset({"args.torch_compile", "args.torch_compile_backend", "args.torch_compile_mode"})

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.torch_compile": choice == ON}
