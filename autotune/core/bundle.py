"""The basis of a bundle's figures, measured or planned, and the document of a planned bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan

SCHEMA = 1


class Basis(StrEnum):
    """The source of a bundle's figures.

    ``MEASURED``: real steps, by ``autotune probe``. ``PLANNED``: traces, by ``autotune plan``; nothing has run.
    """

    MEASURED = "measured"
    PLANNED = "planned"


@dataclass(frozen=True)
class ServerSplit:
    """The GPUs of a machine, of which the first generate, in a vLLM server, and the others train.

    Attributes:
        generation: GPUs of the server, which share its weights and its cache by tensor parallelism.
        training: processes that train, each on a GPU of its own.
        server_bytes: memory that vLLM takes of each GPU of the server.
        cache_bytes: its key-value cache on each.
        sequences: of the longest that the cache holds at once; None if the model's cache is not known.
        serve: the command of the server, which is started before the training.
        training_seconds: of an optimizer step without the generation, whose time is not known; None without a speed.
    """

    generation: int
    training: int
    server_bytes: int
    cache_bytes: int
    sequences: float | None
    serve: str
    training_seconds: float | None = None


@dataclass(frozen=True)
class PlannedBundle:
    """The bundle that ``autotune plan`` wrote. Encoded by ``core.codec``, this is its ``plan.json``.

    Attributes:
        basis: ``planned``: nothing of this was measured.
        directory: absolute path of the bundle.
        device: name of the device that was planned for.
        processes: number that train, each on such a device; the server's GPUs are not included.
        budget_bytes: memory of each device that the training may need.
        candidate: the choices.
        plan: the training plan of the bundle.
        needed_bytes: memory of each device that the training is predicted to need.
        error: share of that by which it may be off, either way.
        spare_bytes: the budget less the need.
        doubts: why it might not fit, in sentences; empty where it is sure to.
        host_bytes: memory of the host that a machine is predicted to need, for all processes that train on it.
        tokens_per_second: predicted; None where the device's speed is not known, or vLLM generates.
        server: the split into GPUs that generate and GPUs that train; None without a server.
        environment: versions of the software that was traced, by package.
        settings: the options that differ from the defaults, by the names of ``autotune.plan``'s parameters.
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
    needed_bytes: int
    error: float
    spare_bytes: int
    doubts: tuple[str, ...] = ()
    host_bytes: int = 0
    tokens_per_second: float | None = None
    server: ServerSplit | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
