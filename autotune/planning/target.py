"""The device that estimates are for."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.gpu import Gpu


@dataclass(frozen=True)
class Accelerator:
    """The device that estimates are for.

    Attributes:
        gpu: the GPU, or None for a CPU.
        budget_bytes: memory that training may need.
        cpu: a CPU whose speeds were measured; None if no times are to be predicted on the CPU.
        process_bytes: the most that a process on a CPU is expected to hold beside its tensors; 0: tensors alone count.
    """

    gpu: Gpu | None
    budget_bytes: int
    cpu: Gpu | None = None
    process_bytes: int = 0
