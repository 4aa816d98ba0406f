"""The document of a planned bundle (``plan.json``), and whether a bundle's figures are measured or planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan


class Basis(StrEnum):
    """The source of a bundle's figures.

    ``MEASURED``: real steps, run by ``autotune probe``. ``PLANNED``: traces, run by ``autotune plan``.
    """

    MEASURED = "measured"
    PLANNED = "planned"


@dataclass(frozen=True)
class ServerSplit:
    """A split of a machine's GPUs: the first ones run a vLLM server that generates, the others train.

    Attributes:
        generation: GPUs of the server, which uses tensor parallelism.
        training: processes that train, each on a GPU of its own.
        server_bytes: memory that vLLM reserves on each GPU of the server.
        cache_bytes: its key-value cache on each.
        sequences: number of the longest sequences that the cache can hold; None if the model's cache is not known.
        serve: the command of the server, which is started before the training.
        training_seconds: time of an optimizer step without the generation; None without a predicted speed.
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
        device: name of the planned device.
        processes: training processes, each on such a device, without the server's GPUs.
        budget_bytes: memory that the training may need on each device.
        candidate: the choices.
        plan: the training plan of the bundle.
        needed_bytes: predicted need on each device.
        error: share of the need by which it may be off, either way.
        spare_bytes: the budget less the need.
        doubts: why it might not fit, in sentences; empty if it fits with its error to spare.
        host_bytes: predicted host memory of a machine, for all its training processes.
        tokens_per_second: predicted rate; None if the device's speed is not known, or vLLM generates.
        server: the split into GPUs that generate and GPUs that train; None without a server.
        environment: versions of the software that was traced, by package.
        settings: the options that differ from the defaults, by the names of ``autotune.plan``'s parameters.
    """

    schema: int = field(default=1, kw_only=True)
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
