"""Collects the stages of one candidate's estimate: its plan, its batches, its traces and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.core.batch_geometry import BatchGeometry
from autotune.core.candidate import Candidate
from autotune.core.explanation import (
    Additions,
    Explanation,
    PartPeak,
    PartTime,
    Subject,
    TracedGroup,
    TracedPoint,
)
from autotune.core.gpu import Gpu
from autotune.core.plan import AllocatorUse
from autotune.core.protocol import TraceRequest
from autotune.planning.additive.group import Group
from autotune.planning.extrapolation.fit import Fit, Point
from autotune.planning.extrapolation.forecast import Forecast
from autotune.planning.extrapolation.mixing import mixed
from autotune.planning.tracing.store import Traces
from autotune.trainers.problem import TrainerProblem


@dataclass(frozen=True)
class TracedTerm:
    """A traced group as it counts in an estimate.

    Attributes:
        requests: of its traces, by depth and shape.
        worst, typical: what follows from them for the whole model.
    """

    group: Group
    weight: float
    fit: Fit
    requests: Mapping[Point, TraceRequest]
    worst: Forecast
    typical: Forecast


@dataclass(frozen=True)
class Basis:
    """What an estimate is made from.

    Attributes:
        layers: of the whole model.
        allocator: how the caching allocator is used.
        terms: one for a traced estimate, several for a composed one, none where there is no estimate.
    """

    geometry: BatchGeometry
    layers: int
    allocator: AllocatorUse
    terms: tuple[TracedTerm, ...]


def explained(
    problem: TrainerProblem, candidate: Candidate, subject: Subject, basis: Basis, traces: Traces, gpu: Gpu | None
) -> Explanation:
    """Return the stages of the estimate of a candidate.

    Args:
        basis: of its estimate.
        gpu: None for a CPU.
    """
    documents = problem.setting.workload.dataset.documents
    geometry = basis.geometry
    known = Explanation(
        subject=subject,
        candidate=candidate,
        training_plan=problem.trainer.plan(candidate, problem.setting),
        documents=documents.rows,
        document_tokens=documents.tokens,
        longest_tokens=documents.longest,
        geometry=geometry,
        layers=basis.layers,
    )
    if not basis.terms:
        return known
    worst = mixed([(term.worst, term.weight) for term in basis.terms])
    typical = mixed([(term.typical, term.weight) for term in basis.terms])
    return replace(
        known,
        groups=tuple(_group(term, basis, traces) for term in basis.terms),
        peaks=tuple(PartPeak(*stretch, levels) for stretch, levels in worst.stretches.items() if levels),
        additions=_additions(worst, gpu),
        times=tuple(
            PartTime(part, time.seconds, repeats)
            for part, time in typical.times.items()
            if (repeats := typical.repeats(part, geometry.micro_batches))
        ),
    )


def _group(term: TracedTerm, basis: Basis, traces: Traces) -> TracedGroup:
    points = tuple(
        TracedPoint(
            layers=point[0],
            shape=point[1],
            weight=weight,
            new=traces.is_new(term.requests[point]),
            tensor_bytes=reply.device.bytes,
            allocated_bytes=reply.replayed(basis.allocator).allocated_bytes,
            reserved_bytes=reply.replayed(basis.allocator).reserved_bytes,
            assumptions=reply.assumptions,
        )
        for point, reply, weight in term.fit.weighted(basis.layers, basis.geometry.worst)
    )
    return TracedGroup(term.group.choices, term.group.layout, term.weight, term.fit.aligned, points)


def _additions(worst: Forecast, gpu: Gpu | None) -> Additions:
    if gpu is None:
        return Additions()
    return Additions(
        rounding_bytes=worst.overhead_bytes - worst.workspace_bytes,
        workspace_bytes=worst.workspace_bytes,
        fragmentation_bytes=worst.unused_bytes,
        context_bytes=gpu.context_bytes,
    )
