"""The stages of the estimate of one candidate, as ``autotune plan --explain`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.batch_geometry import BatchGeometry, Shape
from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.timeline import Part


class Subject(StrEnum):
    """Which candidate is explained: the fastest that fits, or the baseline where nothing does."""

    FASTEST = "fastest"
    BASELINE = "baseline"


@dataclass(frozen=True)
class TracedPoint:
    """One trace that an estimate follows from.

    Attributes:
        layers: number of traced layers.
        shape: of the traced micro-batch.
        weight: of its figures in those of the whole model. Negative ones are subtracted.
        tensor_bytes: the most bytes that tensors held at once.
        allocated_bytes, reserved_bytes: of the simulated caching allocator; on a CPU of tensors, and None.
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
    """The most bytes of tensors in a part of the step, for the whole model on the worst micro-batch.

    Attributes:
        backward: whether it is the part's backward pass.
        categories: the bytes, in PyTorch's words.
        moment: the operator that allocated last before the peak, with the shape of its result, such as
            ``aten.mm.default [8, 512]``; empty if none did in this part.
    """

    part: Part
    backward: bool
    categories: Mapping[str, int]
    moment: str = ""

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(self.categories.values())


@dataclass(frozen=True)
class PartTime:
    """How long a part of the step takes on a typical micro-batch, and how often an optimizer step has it."""

    part: Part
    seconds: float
    times: int


@dataclass(frozen=True)
class Explanation:
    """The stages of one estimate, in their order; their result is the estimate.

    Attributes:
        subject: why this candidate.
        candidate: whose estimate is explained.
        training_plan: the plan that TRL's trainer is built from.
        documents: in the dataset.
        document_tokens: in all of them, before any cutting.
        longest_tokens: of the longest sequence.
        geometry: the micro-batches of the plan on these documents.
        layers: of the whole model.
        traces: of the worst micro-batch; empty where nothing was traced.
        aligned: whether the moments of the traces are the same, so that each was followed; else the peaks alone were.
        peaks: by part of the step, in its order.
        times: by part of the step; empty where the speed of the device is not known.
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
        """The part of the step with the highest peak, or None where nothing was traced."""
        return max(self.peaks, key=lambda peak: peak.total_bytes, default=None)
