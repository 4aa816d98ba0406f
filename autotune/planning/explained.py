"""Collects the stages of one candidate's estimate: its plan, its batches, its traces and what follows from them."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.explanation import Additions, Explanation, PartPeak, PartTime, Subject, TracedPoint
from autotune.core.plan import AllocatorUse
from autotune.planning.evaluator import Evaluator
from autotune.planning.single import TracedPlan
from autotune.planning.tracing.store import Traces
from autotune.trainers.evaluation import whole_geometry


def explained(evaluator: Evaluator, candidate: Candidate, subject: Subject) -> Explanation:
    """Return the stages of the estimate of a candidate that was evaluated."""
    problem, traced = evaluator.problem, evaluator.traced_plan(candidate)
    setting = problem.setting
    plan = problem.trainer.plan(candidate, setting)
    documents = setting.workload.dataset.documents
    known = Explanation(
        subject=subject,
        candidate=candidate,
        training_plan=plan,
        documents=documents.rows,
        document_tokens=documents.tokens,
        longest_tokens=documents.longest,
        geometry=whole_geometry(problem.trainer, plan, setting.workload) if traced is None else traced.geometry,
        layers=len(setting.workload.model.layer_kinds),
    )
    if traced is None:
        return known
    return replace(
        known,
        traces=_points(traced, plan.allocator, evaluator.traces),
        aligned=traced.fit.aligned,
        peaks=tuple(
            PartPeak(*stretch, levels, traced.highest_moment(stretch))
            for stretch, levels in traced.worst.stretches.items()
            if levels
        ),
        additions=_additions(traced, evaluator),
        times=tuple(
            PartTime(part, time.seconds, repeats)
            for part, time in traced.mean.times.items()
            if (repeats := traced.mean.repeats(part, traced.geometry.micro_batches))
        ),
    )


def _points(traced: TracedPlan, allocator: AllocatorUse, traces: Traces) -> tuple[TracedPoint, ...]:
    shape = traced.geometry.worst
    return tuple(
        TracedPoint(
            layers=layers,
            shape=shape,
            weight=weight,
            new=traces.is_new(traced.requests[layers, shape]),
            tensor_bytes=reply.device.bytes,
            allocated_bytes=reply.replayed(allocator).allocated_bytes,
            reserved_bytes=reply.replayed(allocator).reserved_bytes,
            assumptions=reply.assumptions,
        )
        for layers, reply, weight in traced.fit.weighted()
    )


def _additions(traced: TracedPlan, evaluator: Evaluator) -> Additions:
    if evaluator.device is None:
        return Additions()
    worst = traced.worst
    returned_bytes = traced.memory.returned_bytes - traced.memory.within(evaluator.budget_bytes).returned_bytes
    return Additions(
        rounding_bytes=worst.overhead_bytes - worst.workspace_bytes,
        workspace_bytes=worst.workspace_bytes,
        fragmentation_bytes=worst.unused_bytes - returned_bytes,
        context_bytes=evaluator.device.context_bytes,
    )
