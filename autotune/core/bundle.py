"""How what a bundle says of its training came about, and the document of one that was only planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.vllm import ServerSplit

SCHEMA = 1


class Basis(StrEnum):
    """Where the figures of a bundle come from.

    ``MEASURED``: real steps, by ``autotune probe``. ``PLANNED``: traces, by ``autotune plan``; nothing has run.
    """

    MEASURED = "measured"
    PLANNED = "planned"


@dataclass(frozen=True)
class PlannedBundle:
    """The bundle that ``autotune plan`` wrote. Encoded by ``core.codec``, this is its ``plan.json``.

    Attributes:
        basis: ``planned``: nothing of this was measured.
        directory: absolute path of the bundle.
        device: name of the device that was planned for.
        processes: that train, each on such a device; the server's GPUs are not among them.
        budget_bytes: memory of each device that the training may need.
        candidate: the choices.
        plan: the training plan of the bundle.
        why: why it is this one, in a sentence; empty where it is the fastest that is predicted to fit.
        needed_bytes: memory of each device that the training is predicted to need.
        error: share of that by which it may be off, either way.
        spare_bytes: what it leaves of the budget.
        tokens_per_second: predicted; None where the device's speed is not known, or vLLM generates.
        server: the GPUs that generate beside those that train; None without.
        environment: versions of the software that was traced, by package.
        settings: what was asked for and is no default, by the names of ``autotune.plan``'s parameters.
    """

    schema: int
    basis: Basis
    directory: str
    trainer: str
    model: str
    dataset: str
    device: str
    processes: int
    budget_bytes: int
    global_batch_size: int
    candidate: Candidate
    plan: TrainingPlan
    why: str
    needed_bytes: int
    error: float
    spare_bytes: int
    tokens_per_second: float | None = None
    server: ServerSplit | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
