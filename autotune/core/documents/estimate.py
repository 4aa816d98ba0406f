"""Predicted memory and speed of candidates, and the document of ``autotune plan``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf, isclose
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.documents.bundle import PlannedBundle
from autotune.core.documents.explanation import Explanation
from autotune.core.documents.length_report import LengthBin, LengthLimit
from autotune.core.documents.memory_timeline import MemoryTimeline
from autotune.core.documents.short_repr import ShortRepr
from autotune.core.documents.unsearched import ExcludedChoice, Unlockable
from autotune.core.gpu import Gpu
from autotune.core.rows.epoch import Epoch
from autotune.core.step_time import TIME_ERROR

FRAGMENTATION = "fragmentation"
"""The category of memory in a breakdown that the allocator reserves without tensors in it."""


class Origin(StrEnum):
    """The source of an estimate.

    ``TRACED``: traces at the sizes of the candidate's own micro-batches. ``UNKNOWN``: there is no estimate; a probe can
    measure it.
    """

    TRACED = "traced"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted memory and time of training with one configuration.

    Attributes:
        peak_bytes: CUDA: peak of allocated bytes. CPU: peak of tensor bytes.
        reserved_bytes: CUDA: peak of bytes reserved by the caching allocator. CPU: None.
        context_bytes: device memory of the process outside the allocator. CPU: its expected memory outside tensors in a
            search; 0 elsewhere.
        breakdown: use of the device's memory at the peak, in bytes: PyTorch's categories of tensors
            (``parameter``, ``gradient``, ``optimizer state``, ``activation``, ``temporary``, …), then
            ``rounding`` (with the workspaces of libraries), ``fragmentation`` (reserved and free) and ``context``
            (``process`` on a CPU).
            Sums to :attr:`device_bytes`.
        host_bytes: tensors in host memory (the model while it is loaded, offloaded tensors, copies of a save) of the
            process that needs the most.
        machine_bytes: the same for all processes of one machine together.
        step_seconds: time of a typical optimizer step, for ranking; None if the device's speed is not known.
        error: share of :attr:`device_bytes` by which the estimate may be off, either way.
        varied_bytes: bytes that the allocator may reserve beyond :attr:`device_bytes` after micro-batches of many
            lengths, since blocks cached for one length do not always fit the next; None if that was not traced. If the
            device has no room for it, the allocator frees cached blocks, which takes time.
        assumptions: values that neither configuration nor trace determines, in sentences.
        generation_bytes: the training's peak device memory while completions are generated; None without generation.
        synchronisation_bytes: the same while vLLM receives the weights; None without that.
        phase: the phase with the peak; that of the construction includes the first update.
        time_error: share of :attr:`step_seconds` by which it may be off, either way; None on a CPU.
        vllm_bytes: vLLM's memory on the device at the peak of training and vLLM together.
        returned_bytes: freed blocks of :attr:`reserved_bytes`, which the caching allocator keeps while there is room
            and returns when memory is short.
    """

    peak_bytes: int
    reserved_bytes: int | None
    context_bytes: int
    breakdown: Mapping[str, int]
    host_bytes: int
    step_seconds: float | None
    error: float
    assumptions: tuple[str, ...] = ()
    varied_bytes: int | None = None
    generation_bytes: int | None = None
    vllm_bytes: int = 0
    machine_bytes: int = 0
    returned_bytes: int = 0
    synchronisation_bytes: int | None = None
    time_error: float | None = None
    phase: str = ""

    def within(self, budget_bytes: int) -> MemoryEstimate:
        """Return the estimate on a device with this much memory: the allocator returns freed blocks if needed."""
        least_bytes = self.device_bytes - self.returned_bytes
        if self.reserved_bytes is None or not least_bytes <= budget_bytes < self.device_bytes:
            return self
        kept_bytes = self.breakdown.get(FRAGMENTATION, 0) - self.returned_bytes
        return replace(
            self,
            reserved_bytes=self.reserved_bytes - self.returned_bytes,
            breakdown={**self.breakdown, FRAGMENTATION: kept_bytes},
            returned_bytes=0,
        )

    @property
    def device_bytes(self) -> int:
        """Device memory that is needed, context included."""
        own_bytes = self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes
        return own_bytes + self.context_bytes + self.vllm_bytes

    def lacks_host(self, host_bytes: int | None) -> bool:
        """Whether a machine's host memory may be too small for its processes; False if ``host_bytes`` is None."""
        return host_bytes is not None and self.machine_bytes > host_bytes

    @property
    def most_bytes(self) -> int:
        """Upper bound of the need: the estimate with its error, plus :attr:`varied_bytes` if known."""
        return round(self.device_bytes * (1 + self.error)) + (self.varied_bytes or 0)


@dataclass(frozen=True)
class Estimate:
    """The estimate of one candidate.

    Attributes:
        origin: source of the estimate.
        memory: predicted memory and time; None if there is no estimate.
        tokens_per_second: dataset tokens, padding excluded; None if the device's speed is not known, or if only the
            largest micro-batches of a candidate that cannot fit were traced.
        spare_bytes: the budget minus the device memory needed: negative if the candidate does not fit.
        reason: why there is no estimate; empty otherwise.
        scaled_tokens_per_second: the rate if all micro-batches took as long per token as the largest ones, where only
            those were traced; None if ``tokens_per_second`` is known, or the device's speed is not.
    """

    candidate: Candidate
    origin: Origin
    memory: MemoryEstimate | None = None
    tokens_per_second: float | None = None
    spare_bytes: int | None = None
    reason: str = ""
    scaled_tokens_per_second: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the candidate is predicted to fit."""
        return self.spare_bytes is not None and self.spare_bytes >= 0

    @property
    def may_fit(self) -> bool:
        """Whether the candidate would fit if the estimate were too high by its stated error."""
        memory, spare_bytes = self.memory, self.spare_bytes
        return memory is not None and spare_bytes is not None and spare_bytes >= -memory.error * memory.device_bytes

    @property
    def host_bound(self) -> bool:
        """Whether the host bounds its speed, whose time per operator is assumed."""
        return self.memory is not None and (self.memory.time_error or 0.0) > TIME_ERROR

    @property
    def fits_with_error(self) -> bool:
        """Whether the candidate fits, varied lengths included, even if the estimate is too low by its stated error."""
        memory, spare_bytes = self.memory, self.spare_bytes
        return memory is not None and spare_bytes is not None and memory.device_bytes + spare_bytes >= memory.most_bytes


def memory_key(estimate: Estimate) -> float:
    """Return a sort key: the least memory first, unknown memory last."""
    return estimate.memory.device_bytes if estimate.memory is not None else inf


def rank_key(estimate: Estimate) -> tuple[bool, bool, float, int]:
    """Return a sort key: candidates that fit, the fastest first; then those that need the least; then unknown ones."""
    memory = estimate.memory
    need_bytes = memory.device_bytes if memory is not None else 0
    rate = estimate.tokens_per_second or 0.0
    # Of those that do not fit, the nearest to fitting is the most useful.
    return memory is None, not estimate.fits, -rate if estimate.fits else need_bytes, need_bytes


ALIKE_SPEED, ALIKE_MEMORY = 0.01, 0.02
"""Relative differences up to which candidates count as alike, since a choice may have no effect."""


def distinct(estimates: Iterable[Estimate], count: int) -> tuple[Estimate, ...]:
    """Return the first ``count`` ranked estimates, without those that resemble a better one and need no less memory."""
    listed: list[Estimate] = []
    for estimate in estimates:
        if not any(_is_dominated(estimate, other) for other in listed):
            listed.append(estimate)
            if len(listed) == count:
                break
    return tuple(listed)


def _is_dominated(later: Estimate, earlier: Estimate) -> bool:
    """Whether an estimate has about the speed of a better-ranked one, and needs no less of any kind of memory."""
    if later.memory is None or earlier.memory is None:
        return later.memory is earlier.memory and later.reason == earlier.reason
    if later.fits != earlier.fits:
        return False
    sizes = [(each.memory.device_bytes, each.memory.host_bytes) for each in (later, earlier) if each.memory is not None]
    pairs = [(mine, theirs, isclose(mine, theirs, rel_tol=ALIKE_MEMORY)) for mine, theirs in zip(*sizes, strict=True)]
    mine, theirs = later.tokens_per_second, earlier.tokens_per_second
    if mine is None or theirs is None:
        return mine is theirs and all(near for *_, near in pairs)
    return isclose(mine, theirs, rel_tol=ALIKE_SPEED) and all(near or mine > theirs for mine, theirs, near in pairs)


@dataclass(frozen=True)
class Change:
    """The smallest change that makes a candidate fit.

    Attributes:
        candidate: the candidate that does not fit.
        instead: the candidate that fits and differs in the fewest choices; of several, the fastest.
    """

    candidate: Candidate
    instead: Estimate


@dataclass(frozen=True)
class Counts:
    """The numbers of a plan's candidates.

    Attributes:
        candidates: all legal ones, whether a trace was possible or not.
        fitting: predicted to fit.
        too_large: predicted not to fit.
        unknown: without an estimate.
    """

    candidates: int
    fitting: int
    too_large: int
    unknown: int


@dataclass(frozen=True, repr=False)
class Plan(ShortRepr):
    """The result of ``autotune plan``. Encoded by ``core.codec``, this is its JSON document.

    Attributes:
        estimates: estimates of the traced legal candidates: those that fit first, the fastest first.
        counts: the numbers of all candidates, if ``estimates`` has only the best; else None.
        baseline: TRL's default at the same global batch, legal or not.
        changes: the smallest changes that make the shown candidates fit that do not.
        trace_count: number of traces of the estimates.
        new_trace_count: number of these that ran now; the others were cached.
        explanation: the stages of one estimate; None unless requested.
        bundle: the written bundle; None if none was requested, or there is nothing to write.
        unwritten: why a requested bundle was not written; else empty.
        trainer: name of TRL's trainer.
        processes: processes that train together, each on such a GPU: memory is that of the one that needs the most, and
            tokens are those of all.
        lengths: histogram of the row lengths, as in ``autotune lengths``.
        limit: the tokens and rows that the best candidate's ``max_length`` keeps; None if no maximum length applies.
        environment: versions of the traced software, by package.
        host_bytes: memory of this machine, if the GPUs are its own; else None.
        epoch, baseline_epoch: the epochs of the two; ``epoch`` is None if nothing was traced.
        price: price of an hour of one GPU, in the currency of the user's prices; None without one.
        timeline, baseline_timeline: memory through one step of the best candidate and of TRL's default; None if nothing
            was traced.
    """

    schema: int = field(default=1, kw_only=True)
    model: str
    dataset: str
    gpu: Gpu
    budget_bytes: int
    global_batch_size: int
    estimates: tuple[Estimate, ...]
    baseline: Estimate
    changes: tuple[Change, ...] = ()
    left_out: tuple[ExcludedChoice, ...] = ()
    unlockable: tuple[Unlockable, ...] = ()
    notes: tuple[str, ...] = ()
    trace_count: int = 0
    new_trace_count: int = 0
    wall_seconds: float = 0.0
    settings: Mapping[str, object] = field(default_factory=dict)
    explanation: Explanation | None = None
    trainer: str = ""
    processes: int = 1
    host_bytes: int | None = None
    lengths: tuple[LengthBin, ...] = ()
    limit: LengthLimit | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeline: MemoryTimeline | None = None
    baseline_timeline: MemoryTimeline | None = None
    epoch: Epoch | None = None
    baseline_epoch: Epoch | None = None
    price: float | None = None
    bundle: PlannedBundle | None = None
    unwritten: str = ""
    counts: Counts | None = None

    def summary(self, top: int) -> Plan:
        """Return the plan with only the ``top`` best estimates, as a table shows them."""
        return replace(self, estimates=distinct(self.estimates, top), counts=self.candidate_counts)

    @property
    def candidate_counts(self) -> Counts:
        """The numbers of the candidates in ``estimates``."""
        fits = [estimate.fits for estimate in self.estimates if estimate.origin is Origin.TRACED]
        candidates = len(self.estimates)
        return Counts(candidates, sum(fits), len(fits) - sum(fits), unknown=candidates - len(fits))

    @property
    def best(self) -> Estimate | None:
        """The fastest candidate that fits, else the one that needs the least; None if nothing could be traced."""
        known = (estimate for estimate in self.estimates if estimate.memory is not None)
        return self.fastest or next(known, None)

    @property
    def fastest(self) -> Estimate | None:
        """The fastest candidate that is predicted to fit, or None."""
        return next((estimate for estimate in self.estimates if estimate.fits), None)


def smallest_changes(shown: Iterable[Estimate], estimates: Sequence[Estimate]) -> tuple[Change, ...]:
    """Return, for each shown candidate that does not fit, the nearest candidate that fits.

    Args:
        estimates: all estimates, the fastest first, so that the fastest of equally near candidates is chosen.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return ()
    missing = dict.fromkeys(estimate.candidate for estimate in shown if not estimate.fits)
    return tuple(
        Change(candidate, min(fitting, key=lambda other: len(other.candidate.differences(candidate))))
        for candidate in missing
    )


class Runner(Protocol):
    """Runs candidates of one problem and returns an estimate of each.

    An estimate has memory, time, origin and error, or origin ``UNKNOWN`` and the reason. Results are cached by training
    plan: a candidate, or another with the same plan, runs once.
    """

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the results of candidates in their normal form, in their order.

        Raises:
            AutotuneError: nothing can be run.
        """
