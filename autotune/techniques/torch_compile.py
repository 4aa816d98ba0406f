"""``torch_compile``: the model compiled by TorchInductor."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Option, Technique


class TorchCompile(Technique):
    """``torch_compile`` of ``TrainingArguments``. Not in the default space: compiling takes minutes per probe."""

    name = "torch_compile"
    summary = "Compiles the model, which fuses kernels and takes minutes whenever shapes are new."
    options = (Option(OFF, "runs as written"), Option(ON, "compiled by TorchInductor"))
    trl_default = OFF
    unplanned = "the speed of compiled code, and the memory that fusing saves: a trace runs the step as written"
    needs = "a C++ compiler"
    writes = frozenset({"args.torch_compile"})

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.torch_compile": choice == ON}


TECHNIQUE = TorchCompile()
