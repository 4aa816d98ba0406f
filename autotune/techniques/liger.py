"""``liger``: Liger's Triton kernels in place of a model's layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Equipped, Option

_ENTRY = re.compile(r'^ +"(\w+)": apply_liger_kernel_to_\w+,', re.MULTILINE)


@cache
def _supported_models() -> frozenset[str]:
    """Return the ``model_type`` of the architectures for which the installed Liger has layers.

    They are the keys of ``MODEL_TYPE_TO_APPLY_LIGER_FN``; its module is searched, since importing it takes seconds.
    """
    spec = find_spec("liger_kernel")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).with_name("transformers") / "monkey_patch.py"
    return frozenset(_ENTRY.findall(source.read_text(encoding="utf-8")))


class Liger(Equipped):
    """``use_liger_kernel``. TRL 1.15 and later enable its layer kernels and disable its fused loss."""

    summary = "Replaces normalisation, rotary embedding and MLP by fused Triton kernels."
    options = (Option(OFF, "the model's own layers"), Option(ON, "Liger's layers, for architectures that have them"))
    # Triton has no driver on a CPU.
    without_gpu = "its Triton kernels need a CUDA GPU"
    package = "liger-kernel"
    needs = "the package liger-kernel and a CUDA GPU"
    writes = frozenset({"args.use_liger_kernel", "args.liger_kernel_config"})

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for an architecture that Liger silently ignores."""
        model_type = setting.workload.model.model_type
        if choice == OFF or not _supported_models() or model_type in _supported_models():
            return None
        return f"Liger has no layers for {model_type}, and would silently change nothing"

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return the reason of :meth:`unsuitable`, for the check of a user's own configuration."""
        return self.unsuitable(choice, setting)

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.use_liger_kernel": choice == ON}
