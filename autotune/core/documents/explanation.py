"""The stages by which one estimate is computed, for ``autotune plan --explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Shape
from autotune.core.timeline import Part


class Subject(StrEnum):
    """The explained candidate: the fastest that fits, or the baseline if none fits."""

    FASTEST = "fastest"
    BASELINE = "baseline"


@dataclass(frozen=True)
class TracedPoint:
    """One trace that an estimate is computed from.

    Attributes:
        layers: number of traced layers.
        shape: shape of the traced micro-batch.
        weight: its coefficient in the extrapolation to the whole model; may be negative.
        tensor_bytes: peak of tensor bytes.
        allocated_bytes, reserved_bytes: peaks of the simulated caching allocator; on a CPU, tensor bytes and None.
        assumptions: assumptions of the trace, with counts.
    """

    layers: int
    shape: Shape
    weight: float
    tensor_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    assumptions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PartPeak:
    """The peak of tensor bytes in a part of the step, for the whole model on the worst micro-batch.

    Attributes:
        backward: whether it is the part's backward pass.
        categories: bytes by PyTorch's category.
        moment: the last operator in this part that allocated before the peak, with the shape of its result, such as
            ``aten.mm.default [8, 512]``; empty without one.
    """

    part: Part
    backward: bool
    categories: Mapping[str, int]
    moment: str = ""

    @property
    def total_bytes(self) -> int:
        """Sum over all categories."""
        return sum(self.categories.values())


@dataclass(frozen=True)
class PartTime:
    """The time of a part of the step on a typical micro-batch, and how often it runs in an optimizer step."""

    part: Part
    seconds: float
    times: int


@dataclass(frozen=True)
class Explanation:
    """The stages of one estimate, in order.

    Attributes:
        subject: why this candidate is explained.
        candidate: the explained candidate.
        training_plan: its training plan.
        documents: number of documents in the dataset.
        document_tokens: tokens of all documents, before any cutting.
        longest_tokens: tokens of the longest sequence.
        geometry: the batch geometry of the plan on these documents.
        layers: layers of the whole model.
        traces: traces of the worst micro-batch; empty if nothing was traced.
        aligned: whether the traces have the same moments, so that each was extrapolated; else only the peaks were.
        peaks: peaks by part of the step, in order.
        times: times by part of the step; empty if the speed of the device is not known.
    """

    subject: Subject
    candidate: Candidate
    training_plan: TrainingPlan
    documents: int
    document_tokens: int
    longest_tokens: int
    geometry: BatchGeometry
    layers: int
    traces: tuple[TracedPoint, ...] = ()
    aligned: bool = True
    peaks: tuple[PartPeak, ...] = ()
    times: tuple[PartTime, ...] = ()

    @property
    def peak(self) -> PartPeak | None:
        """The part of the step with the highest peak, or None if nothing was traced."""
        return max(self.peaks, key=lambda peak: peak.total_bytes, default=None)
