"""``attention``: which implementation computes attention."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.techniques.base import Option, Technique
from autotune.techniques.hub_kernels import kernels_missing
from autotune.techniques.trace_impact import NO_PATCHES

SDPA = "sdpa"
EAGER = "eager"
FLEX = "flex_attention"
_PAGED = "kernels-community/paged-attention"


@dataclass(frozen=True)
class _Flash:
    """The requirements of a FlashAttention implementation.

    Attributes:
        package: distribution that holds it; None for a kernel of the Hub.
        capability: lowest CUDA compute capability.
    """

    package: str | None
    capability: tuple[int, int]


# Compute capabilities: FlashAttention's own README (2: Ampere and later; 3: Hopper; 4: Hopper and Blackwell).
_FLASH = {
    "flash_attention_2": _Flash("flash-attn", (8, 0)),
    "flash_attention_3": _Flash("flash-attn-3", (9, 0)),
    "flash_attention_4": _Flash("flash-attn-4", (9, 0)),
    "kernels-community/flash-attn2": _Flash(None, (8, 0)),
    "kernels-community/vllm-flash-attn3": _Flash(None, (9, 0)),
}


class Attention(Technique):
    """The implementation that ``attn_implementation`` names."""

    name = "attention"
    summary = "Chooses the kernel of attention; fused ones never hold the matrix of scores."
    options = (
        Option(EAGER, "plain matrix products; holds the matrix of scores"),
        Option(SDPA, "PyTorch's fused attention; a packed row costs it a mask of row by row"),
        Option(FLEX, "PyTorch's compiled attention with block masks"),
        Option("flash_attention_2", "FlashAttention 2"),
        Option("flash_attention_3", "FlashAttention 3"),
        Option("flash_attention_4", "FlashAttention 4"),
        Option("kernels-community/flash-attn2", "FlashAttention 2 from the Hub"),
        Option("kernels-community/vllm-flash-attn3", "FlashAttention 3 from the Hub"),
        Option(_PAGED, "attention over a paged cache from the Hub: generation only"),
    )
    trl_default = SDPA
    needs = "flash: its package or kernels, and a GPU of its generation; flex: a GPU"
    writes = frozenset({"model.attn_implementation"})
    impact = NO_PATCHES

    def default(self, setting: Setting) -> Choice:
        """Return sdpa, or eager where the architecture has no sdpa, as transformers does by default."""
        check = setting.workload.packing_checks.get(SDPA)
        return EAGER if check is not None and not check.supported else SDPA

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason where the GPU generation or the package that a fused kernel needs is missing."""
        hardware = machine.hardware
        if choice == _PAGED:
            return "it attends to a paged cache, has no backward pass, and transformers' continuous batching refuses it"
        if choice == FLEX and hardware.kind == "cpu":
            return "flex_attention has no backward pass on a CPU"
        flash = _FLASH.get(str(choice))
        if flash is None:
            return None
        if hardware.kind == "cpu":
            return "FlashAttention needs a CUDA GPU"
        if (hardware.compute_capability or (0, 0)) < flash.capability:
            major, minor = flash.capability
            return f"it needs a GPU of compute capability {major}.{minor} or later"
        if flash.package is None:
            return kernels_missing(machine)
        if flash.package not in machine.packages:
            return f"the package {flash.package} is not installed"
        return None

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason where the architecture does not support the implementation."""
        check = setting.workload.packing_checks.get(str(choice))
        if check is not None and not check.supported:
            return f"{setting.workload.model.model_type} does not run with attention={choice}: {check.reason}"
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason for FlashAttention outside of half precision, the only types it computes in."""
        if choice in _FLASH and candidate["precision"] == "float32":
            return f"{choice} computes in bf16 or fp16 only, and precision=float32 has neither"
        return None


TECHNIQUE = Attention()
