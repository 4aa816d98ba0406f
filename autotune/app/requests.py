"""Builds probe requests and the store of traces, for every use case and benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.gpu import Gpu
from autotune.core.machine import Machine
from autotune.core.measurement import Schedule
from autotune.core.protocol import ProbeRequest
from autotune.core.workload import Workload
from autotune.inspection.machine import environment
from autotune.planning.tracing.cache import Cache, source_digest
from autotune.planning.tracing.operators import OperatorTimes
from autotune.planning.tracing.store import Tracer, Traces
from autotune.trainers.problem import TrainerProblem


def probe_request(
    problem: TrainerProblem, candidate: Candidate, schedule: Schedule, limit_bytes: int | None, seed: int
) -> ProbeRequest:
    """Return the request that measures a candidate of a problem."""
    setting = problem.setting
    evaluation = setting.workload.evaluation
    return ProbeRequest(
        plan=problem.trainer.plan(candidate, setting),
        model=setting.workload.model_source,
        device=setting.machine.hardware.kind,
        tokenized_directory=setting.workload.dataset.tokenized_directory,
        # Where rows have images, the pixels of all micro-batches of a step are on the device together.
        schedule=replace(schedule, whole_steps=schedule.whole_steps or setting.workload.has_images),
        limit_bytes=limit_bytes,
        seed=seed,
        evaluation_directory=evaluation.tokenized_directory if evaluation is not None else None,
    )


def traces_of(
    workload: Workload,
    machine: Machine,
    tracer: Tracer,
    cache: Cache,
    gpus: Sequence[Gpu] = (),
    times: OperatorTimes | None = None,
) -> Traces:
    """Return the traces of a workload's model with the software of a machine and this source of autotune.

    Args:
        gpus: all that traces will be asked for, where there are several.
        times: of operators on this machine's device, for traces of it; None: times follow from peak speeds.
    """
    versions = {**environment(machine), "autotune": source_digest()}
    return Traces(tracer, cache, workload.models_fingerprint, versions, gpus, times)
