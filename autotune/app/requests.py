"""Builds probe requests and the store of traces, for all use cases and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.gpu import Gpu
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.machine import DeviceKind, Machine
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload
from autotune.inspection.machine import environment
from autotune.planning.tracing.cache import Cache, package_digest
from autotune.planning.tracing.operators import OperatorTimes
from autotune.planning.tracing.store import Tracer, Traces
from autotune.trainers.problem import TrainerProblem


def probe_request(
    problem: TrainerProblem, candidate: Candidate, schedule: Schedule, limit_bytes: int | None, seed: int
) -> ProbeRequest:
    """Return the request that measures a candidate of a problem."""
    setting = problem.setting
    plan, kind = problem.trainer.plan(candidate, setting), setting.machine.hardware.kind
    return request_of(plan, setting.workload, kind, schedule, limit_bytes, seed)


def request_of(
    plan: TrainingPlan,
    workload: Workload,
    device: DeviceKind,
    schedule: Schedule,
    limit_bytes: int | None,
    seed: int = ProbeRequest.seed,
) -> ProbeRequest:
    """Return the request that measures a plan on the rows of a workload."""
    evaluation = workload.evaluation
    return ProbeRequest(
        plan=plan,
        model=workload.model_source,
        device=device,
        tokenized_directory=workload.dataset.tokenized_directory,
        # The images of all micro-batches of a step are on the device at once, so only whole steps show the memory.
        schedule=replace(schedule, whole_steps=schedule.whole_steps or workload.has_images),
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
        gpus: all GPUs to trace for, if there are several.
        times: measured times of operators on this machine's device; None: times follow from peak speeds.
    """
    versions = {**environment(machine), "autotune": package_digest()}
    return Traces(tracer, cache, workload.models_fingerprint, versions, gpus, times)
