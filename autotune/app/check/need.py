"""Finds the memory that a training needs: measured by a study, measured by a real run, or traced."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.app.requests import request_of
from autotune.core.configuration import Configuration
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.result import MeasuredCandidate, Result
from autotune.core.documents.verdict import Need, Outcome, Source, outcome_for
from autotune.core.effort import EFFORTS
from autotune.core.files.codec import decoded
from autotune.core.files.nested import merge
from autotune.core.machine import DeviceKind, Machine
from autotune.core.measurement import Measurement
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.status import OUT_OF_MEMORY, ProbeStatus
from autotune.core.workload import Workload
from autotune.emit.bundle import RESULT
from autotune.inspection.machine import environment
from autotune.planning.single import PlanTracer, SizedPlan
from autotune.probing import JobServer, probe
from autotune.techniques.packing import NAME as PACKING
from autotune.trainers import find_trainer
from autotune.units import MIB, format_duration
from autotune.userconfig.bundle import trains_like

CPU_PROCESS_BYTES = 160 * MIB
"""Memory of a process on a CPU outside its tensors: allocations of libraries, and freed blocks that malloc keeps. By
bisection, runs of four configurations with 243 to 518 MiB of traced tensors needed a limit of 60 to 120 MiB above 1.1
times that (tests/app/check/test_against_real_runs.py has these and six more)."""
# If the budget is this multiple of the need, traces at full depth and after varied lengths cannot change the outcome:
# varied lengths added at most 17 % in traces of published GPU runs (benchmarks/published).
_AMPLE = 1.5
_LENGTH = "max_length"


@dataclass(frozen=True)
class CheckAnswer:
    """The outcome of a check, and the need or the reason for it."""

    outcome: Outcome
    need: Need | None
    reason: str = ""


def memory_near(tracer: PlanTracer, sized: SizedPlan, budget_bytes: int) -> MemoryEstimate:
    """Return the memory of a plan, traced at full depth and after varied lengths if it is near the budget.

    Raises:
        UntraceableError: a step of it cannot be traced.
        VllmError: vLLM cannot run with it.
    """
    memory = tracer.memory(sized)
    least_bytes = memory.device_bytes - memory.returned_bytes
    if least_bytes * (1 - memory.error) <= budget_bytes < _AMPLE * memory.device_bytes:
        memory = tracer.memory(sized, whole=True)
    return memory.within(budget_bytes)


def judge_by_traces(tracer: PlanTracer, sized: SizedPlan, planned: Machine, budget_bytes: int) -> CheckAnswer:
    """Return the need of a plan according to traces.

    Raises:
        UntraceableError: a step of it cannot be traced.
        VllmError: vLLM cannot run with it.
    """
    geometry, memory = sized.geometry, memory_near(tracer, sized, budget_bytes)
    step_seconds = memory.step_seconds if sized.is_timed_by_largest else None
    need = Need(
        Source.TRACED,
        memory.device_bytes,
        round(memory.device_bytes * (1 - memory.error)),
        memory.most_bytes + (CPU_PROCESS_BYTES if planned.gpu is None else 0),
        geometry.worst.rows,
        round(geometry.worst.tokens),
        phase=memory.phase,
        memory=memory,
        tokens_per_second=geometry.tokens_per_step / step_seconds if step_seconds else None,
        varied_bytes=memory.varied_bytes,
    )
    outcome = outcome_for(need, budget_bytes)
    if outcome is Outcome.FITS and planned.gpu is not None and memory.lacks_host(planned.host_bytes):
        # A checkpoint in the trained type is memory-mapped from its file, so less host memory may be enough.
        outcome = Outcome.TOO_CLOSE
    return CheckAnswer(outcome, need)


def needs_more(need: Need, budget_bytes: int) -> bool:
    """Return whether a need that was traced for a larger budget lacks the traces that a near budget requires."""
    return need.varied_bytes is None and need.least_bytes <= budget_bytes < _AMPLE * need.bytes


def judge_by_probe(
    sized: SizedPlan,
    workload: Workload,
    planned: Machine,
    budget_bytes: int,
    server: JobServer,
    folder: Path,
    timeout_seconds: float | None,
) -> CheckAnswer:
    """Return the need in a real run of a plan's worst micro-batches, on this machine's device and within the budget.

    Args:
        timeout_seconds: time limit from the start of its process; None: no limit.
    """
    kind = planned.hardware.kind
    plan, schedule = _on_device(sized.plan, kind), EFFORTS["quick"].confirmation
    measured = probe(server, request_of(plan, workload, kind, schedule, budget_bytes), folder, timeout_seconds)
    if measured.status is ProbeStatus.TIMEOUT:
        limit = f"{format_duration(timeout_seconds or 0.0)} (--timeout)"
        reason = f"the run was ended after {limit}, before it had shown whether it fits"
        return CheckAnswer(Outcome.UNKNOWN, None, reason)
    if measured.unexplained:
        return CheckAnswer(Outcome.UNKNOWN, None, measured.reason)
    if not measured.ok and measured.status not in OUT_OF_MEMORY:
        return CheckAnswer(Outcome.CANNOT_RUN, None, measured.reason)
    ended = measured.out_of_memory
    need_bytes = ended.attempted_bytes if ended is not None else measured.used_bytes
    if need_bytes is None:
        # The kernel killed the run, or it ran out of host memory.
        return CheckAnswer(Outcome.DOES_NOT_FIT, None, measured.reason)
    need = _measured_need(Source.PROBED, need_bytes, sized.geometry, measured)
    if not measured.ok:
        need = replace(need, phase=ended.phase if ended is not None else "")
    return CheckAnswer(Outcome.FITS if measured.ok else Outcome.DOES_NOT_FIT, need, measured.reason)


def _on_device(plan: TrainingPlan, kind: DeviceKind) -> TrainingPlan:
    args = deepcopy(dict(plan.args))
    for path, value in find_trainer(plan.trainer).device_args(kind, in_group=plan.in_group).items():
        merge(args, path.split("."), value)
    return replace(plan, args=args)


def _measured_need(
    source: Source, need_bytes: int, geometry: BatchGeometry, figures: Measurement | MeasuredCandidate
) -> Need:
    """Return a measured need, which has no error; its phase is the one with the highest peak."""
    worst, peaks = geometry.worst, figures.peaks
    return Need(
        source,
        need_bytes,
        need_bytes,
        need_bytes,
        worst.rows,
        round(worst.tokens),
        phase=max(peaks, key=lambda name: peaks[name], default=""),
        tokens_per_second=figures.tokens_per_second,
    )


def _with_capped_length(plan: TrainingPlan, workload: Workload) -> TrainingPlan:
    """Return a plan with its maximum length capped at the longest row, so that limits without effect compare equal."""
    length = plan.number(_LENGTH)
    if _LENGTH not in plan.args or plan.args.get(PACKING) or (length is not None and length < workload.longest):
        return plan
    return replace(plan, args={**plan.args, _LENGTH: workload.longest})


def _sizes(workload: Workload, cut: int | None = None) -> list[tuple[LengthDistribution, ...]]:
    """Return the sizes of the rows to train on and of those to evaluate on: tokens, and images in several measures.

    Args:
        cut: length to which rows are cut beforehand: a bundle has them as they were trained on.
    """
    return [
        (
            profile.lengths if cut is None else profile.lengths.cut_to(cut),
            *((images.in_row, images.elements, images.ends) if (images := profile.images) is not None else ()),
        )
        for profile in workload.profiles
    ]


def judge_by_study(
    config: Configuration, sized: SizedPlan, folder: Path, workload: Workload, planned: Machine, budget_bytes: int
) -> CheckAnswer | None:
    """Return the need measured by the study whose bundle has the configuration; None if it measured another plan.

    Args:
        folder: the folder of the configuration.
    """
    result = decoded(Result, folder / RESULT)
    if result is None or result.recommended is None or not result.confirmed:
        return None
    hardware, known = planned.hardware, result.hardware
    trained = result.recommended.plan
    same = (
        (known.kind, known.name, known.processes) == (hardware.kind, hardware.name, hardware.processes),
        result.trainer == sized.plan.trainer,
        result.workload.models_fingerprint == workload.models_fingerprint,
        _sizes(result.workload, trained.truncate_to) == _sizes(workload),
        dict(result.environment) == environment(planned),
        trains_like(_with_capped_length(trained, workload), _with_capped_length(sized.plan, workload), config),
    )
    if not all(same):
        return None
    need = _measured_need(Source.STUDIED, result.recommended.used_bytes or 0, sized.geometry, result.recommended)
    return CheckAnswer(outcome_for(need, budget_bytes), need)
