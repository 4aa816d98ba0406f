"""The predicted memory and speed of configurations that have not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf, isclose
from typing import Protocol

from autotune.core.bundle import PlannedBundle
from autotune.core.candidate import Candidate
from autotune.core.epoch import Epoch
from autotune.core.explanation import Explanation
from autotune.core.gpu import Gpu
from autotune.core.length_report import LengthBin, LengthLimit
from autotune.core.memory_timeline import MemoryTimeline
from autotune.core.step_time import TIME_ERROR
from autotune.core.unsearched import LeftOut, Unlockable

SCHEMA = 1

FRAGMENTATION = "fragmentation"
"""The name in a breakdown of reserved memory without tensors."""


class Origin(StrEnum):
    """The source of an estimate.

    ``TRACED``: traces at the sizes of the candidate's own micro-batches. ``UNKNOWN``: there is no estimate, and only a
    probe can measure it.
    """

    TRACED = "traced"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted memory and time of training with one configuration.

    Attributes:
        peak_bytes: CUDA: peak of allocated bytes. CPU: peak of tensor bytes.
        reserved_bytes: CUDA: peak of bytes reserved by the caching allocator. CPU: None.
        context_bytes: device memory that the process holds outside the allocator. CPU: what it is expected to hold
            outside tensors, in a search; 0 elsewhere.
        breakdown: use of the device's memory at the peak, in bytes: PyTorch's categories of tensors
            (``parameter``, ``gradient``, ``optimizer state``, ``activation``, ``temporary``, …), then
            ``rounding`` (with the workspaces of libraries), ``fragmentation`` (reserved and free) and ``context``
            (``process`` on a CPU).
            Sums to :attr:`device_bytes`.
        host_bytes: tensors in the host's memory (the model while it is loaded, what is offloaded, what a save copies or
            gathers there) of the process that needs the most.
        machine_bytes: the same of all processes in one machine together.
        step_seconds: time of a typical optimizer step, for ranking; None if the device's speed is not known.
        error: share of :attr:`device_bytes` by which the estimate may be off, either way.
        varied_bytes: bytes that the allocator may reserve beyond :attr:`device_bytes` after micro-batches of many
            lengths, since blocks cached for one length do not always fit the next; None if that was not traced. If the
            device has no room for it, the allocator frees cached blocks, which takes time.
        assumptions: assumptions where neither configuration nor trace determines a value, in sentences.
        generation_bytes: the most that the training holds of :attr:`device_bytes` while completions are generated; None
            if none are.
        synchronisation_bytes: the same while vLLM gets its weights; None if it gets none.
        time_error: share of :attr:`step_seconds` by which it may be off, either way; None on a CPU.
        beside_bytes: vLLM's memory on the device at the peak of training and vLLM together.
        returned_bytes: what the caching allocator would return of :attr:`reserved_bytes` to a device that is short of
            memory: blocks that were freed, which it keeps while there is room.
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
    beside_bytes: int = 0
    machine_bytes: int = 0
    returned_bytes: int = 0
    synchronisation_bytes: int | None = None
    time_error: float | None = None

    def within(self, budget_bytes: int) -> MemoryEstimate:
        """Return the estimate for a device of so much memory: the allocator keeps no freed blocks that do not fit."""
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
        return own_bytes + self.context_bytes + self.beside_bytes

    @property
    def host_need_bytes(self) -> int:
        """Host memory that a machine has to have; documents of earlier versions have that of one process only."""
        return max(self.host_bytes, self.machine_bytes)

    def lacks_host(self, host_bytes: int | None) -> bool:
        """Whether the processes of a machine may hold more on the host together than it has; None: it is not known."""
        return host_bytes is not None and self.host_need_bytes > host_bytes

    @property
    def most_bytes(self) -> int:
        """Upper bound of the need: the estimate with its error, and what varied lengths add if that is known."""
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
        scaled_tokens_per_second: from the time of the largest micro-batches, as if time were proportional to tokens: it
            orders what a search traces next, and is never shown.
    """

    candidate: Candidate
    origin: Origin
    memory: MemoryEstimate | None = None
    tokens_per_second: float | None = None
    spare_bytes: int | None = None
    reason: str = ""
    scaled_tokens_per_second: float | None = None

    @property
    def shown(self) -> Estimate:
        """The estimate without what is never shown."""
        return replace(self, scaled_tokens_per_second=None)

    @property
    def fits(self) -> bool:
        """Whether the candidate is predicted to fit."""
        return self.spare_bytes is not None and self.spare_bytes >= 0

    @property
    def may_fit(self) -> bool:
        """Whether the candidate fits if its memory is overestimated by its stated error."""
        memory, spare_bytes = self.memory, self.spare_bytes
        return memory is not None and spare_bytes is not None and spare_bytes >= -memory.error * memory.device_bytes

    @property
    def host_bound(self) -> bool:
        """Whether its speed depends on the host's time per operator, which is assumed."""
        return self.memory is not None and (self.memory.time_error or 0.0) > TIME_ERROR

    @property
    def sure(self) -> bool:
        """Whether it fits after varied lengths even if its memory is underestimated by its stated error."""
        memory, spare_bytes = self.memory, self.spare_bytes
        return memory is not None and spare_bytes is not None and memory.device_bytes + spare_bytes >= memory.most_bytes


def need(estimate: Estimate) -> float:
    """Return a key that sorts by memory, the least first, and then what is unknown."""
    return estimate.memory.device_bytes if estimate.memory is not None else inf


def rank(estimate: Estimate) -> tuple[bool, bool, float, int]:
    """Return a sort key: candidates that fit, the fastest first; then by least memory; then unknown ones."""
    memory = estimate.memory
    need_bytes = memory.device_bytes if memory is not None else 0
    rate = estimate.tokens_per_second or 0.0
    # Of those that do not fit, the nearest to fitting is what helps.
    return memory is None, not estimate.fits, -rate if estimate.fits else need_bytes, need_bytes


ALIKE_SPEED, ALIKE_MEMORY = 0.01, 0.02
"""Shares up to which candidates are alike, since a choice may have no effect."""


def distinct(estimates: Iterable[Estimate], count: int) -> tuple[Estimate, ...]:
    """Return the first ``count`` estimates of which each is slower or needs less memory than each before it."""
    kept: list[Estimate] = []
    for estimate in estimates:
        if not any(_is_dominated(estimate, other) for other in kept):
            kept.append(estimate)
            if len(kept) == count:
                break
    return tuple(kept)


def _is_dominated(later: Estimate, earlier: Estimate) -> bool:
    """Whether an estimate is alike in speed to one before it, and in no kind of memory needs less."""
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
    """The number of a plan's candidates.

    Attributes:
        candidates: all legal ones that were traced, or could not be.
        fitting: predicted to fit.
        too_large: predicted not to fit.
        unknown: without an estimate.
    """

    candidates: int
    fitting: int
    too_large: int
    unknown: int


@dataclass(frozen=True)
class Plan:
    """The result of ``autotune plan``. Encoded by ``core.codec``, this is its JSON document.

    Attributes:
        estimates: of the legal candidates that were traced: those that fit first, the fastest first.
        counts: of all candidates, where ``estimates`` has the best alone; None where it has all.
        baseline: TRL's default at the same global batch, legal or not.
        changes: for those that do not fit and were asked about.
        trace_count: number of traces of the estimates.
        new_trace_count: of these, how many were run now; the others were kept from before.
        explanation: the stages of one estimate; None unless requested.
        bundle: the written bundle; None if none was requested, or there is nothing to write.
        unwritten: why there is nothing to write though it was asked for; empty otherwise.
        trainer: name of TRL's trainer.
        processes: number that train together, each on such a GPU: memory is that of the one that needs the most, and
            tokens are those of all.
        lengths: of the rows, as ``autotune lengths`` counts them.
        limit: what the ``max_length`` of the best candidate keeps of them; None where a shorter one would cut and drop
            none, as those of a trainer that has no ``max_length``, or where it is none.
        environment: versions of the software that was traced, by package.
        host_bytes: memory of the machine that the GPUs are in, where it is this one; None where it is not known.
        epoch, baseline_epoch: the batches and the epoch of the same two; ``epoch`` is None where nothing was traced.
        price: of an hour of one GPU, in the currency of the user's prices; None if there is none.
        timeline, baseline_timeline: memory through one step, of the fastest that fits (of what needs the least where
            nothing does), and of TRL's default; None where nothing was traced.
    """

    schema: int
    model: str
    dataset: str
    gpu: Gpu
    budget_bytes: int
    global_batch_size: int
    estimates: tuple[Estimate, ...]
    baseline: Estimate
    changes: tuple[Change, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
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
        """Return the plan with the estimates of the ``top`` best candidates alone, as a table shows them."""
        return replace(self, estimates=distinct(self.estimates, top), counts=self.counted)

    @property
    def counted(self) -> Counts:
        """The numbers of the candidates in ``estimates``."""
        fits = [estimate.fits for estimate in self.estimates if estimate.origin is Origin.TRACED]
        candidates = len(self.estimates)
        return Counts(candidates, sum(fits), len(fits) - sum(fits), unknown=candidates - len(fits))

    @property
    def best(self) -> Estimate | None:
        """The fastest that fits, or the one that needs the least; None where nothing could be traced."""
        known = (estimate for estimate in self.estimates if estimate.memory is not None)
        return self.fastest or next(known, None)

    @property
    def fastest(self) -> Estimate | None:
        """The fastest candidate that is predicted to fit, or None."""
        return next((estimate for estimate in self.estimates if estimate.fits), None)


def smallest_changes(asked: Iterable[Estimate], estimates: Sequence[Estimate]) -> tuple[Change, ...]:
    """Return, for each asked candidate that does not fit, the nearest candidate that fits.

    Args:
        estimates: all estimates, the fastest first, so that of equally near candidates the fastest is taken.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return ()
    missing = dict.fromkeys(estimate.candidate for estimate in asked if not estimate.fits)
    return tuple(
        Change(candidate, min(fitting, key=lambda other: len(other.candidate.differences(candidate))))
        for candidate in missing
    )


class Runner(Protocol):
    """Runs candidates of one problem and returns what each needs.

    Each result has memory, time, origin and error, or origin ``UNKNOWN`` and the reason. A candidate that was run
    before is not run again, nor is one whose training plan is the same.
    """

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the results of candidates in their normal form, in their order.

        Raises:
            AutotuneError: nothing can be run.
        """
