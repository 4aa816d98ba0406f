"""The content of a bundle: one training and its figures, measured or planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.core.bundle import Basis, ServerSplit
from autotune.core.machine import Hardware
from autotune.core.plan import TrainingPlan
from autotune.core.result import BaseFile
from autotune.core.workload import Workload

_SOFTWARE = ("torch", "transformers", "trl", "peft", "accelerate", "driver")


@dataclass(frozen=True)
class Handover:
    """One training as the files of a bundle have it.

    Attributes:
        plan: the arguments of the training.
        workload, hardware: of the training.
        basis: whether its figures are measured or planned.
        figures: its figures, their source and validity; one sentence each.
        timed: whether its speed is among them.
        threads: CPU threads of each process; None where the machine's cores are not known.
        server: the GPUs of the same machine on which a vLLM server generates, before those that train; None without.
        base: the user's configuration that it changes; None without one.
    """

    plan: TrainingPlan
    workload: Workload
    hardware: Hardware
    basis: Basis
    figures: tuple[str, ...]
    timed: bool = True
    threads: int | None = None
    server: ServerSplit | None = None
    base: BaseFile | None = None

    @property
    def on_one_gpu(self) -> bool:
        """Whether one process trains on a GPU that no launcher gives it: TRL refuses it where it sees several.

        transformers would copy the model to all of them (``nn.DataParallel``); online DPO is not even refused.
        """
        return self.hardware.kind == "cuda" and not self.plan.in_group


def software_text(environment: Mapping[str, str]) -> str:
    """Return names and versions of the software that memory and speed depend on the most; empty if none is known."""
    return ", ".join(f"{name} {environment[name]}" for name in _SOFTWARE if name in environment)
