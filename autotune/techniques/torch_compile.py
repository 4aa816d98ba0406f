"""``torch_compile``: the model compiled by TorchInductor."""

from __future__ import annotations

from autotune.techniques.base import OFF, ON, Option, Technique
from autotune.techniques.trace_impact import TraceImpact


class TorchCompile(Technique):
    """``torch_compile`` of ``TrainingArguments``. Not in the default space: compiling takes minutes per probe."""

    summary = "Compiles the model, which takes minutes for each new shape."
    options = (
        Option(OFF, "runs as written", entries={"args.torch_compile": False}),
        Option(ON, "compiled by TorchInductor", entries={"args.torch_compile": True}),
    )
    impact = TraceImpact(unplanned="speed and memory of compiled code: a trace runs the step eagerly")
    needs = "a C++ compiler"
    # A backend or a mode switches it on as well (TrainingArguments.__post_init__).
    writes = frozenset({"args.torch_compile", "args.torch_compile_backend", "args.torch_compile_mode"})
