"""The measurement of one probe, of one process or of all ranks together, and the schedule by which it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.status import ProbeStatus


@dataclass(frozen=True)
class Schedule:
    """How long a probe trains.

    Memory is steady from the second micro-batch of the second optimizer step on, when gradients and optimizer state
    exist. So a probe needs no whole steps: it runs steps of at most two micro-batches, times the micro-batches and the
    rest of a step separately, and computes the time of a whole step. Its cost does not depend on the global batch.

    Attributes:
        whole_steps: whether optimizer steps have all the micro-batches of the plan, instead of at most two.
        timing_only: whether the run is for its time alone: it begins with the largest micro-batch, which it does not
            repeat once gradients and optimizer state exist, and does not evaluate.
        worst_last: whether the last step ends with the largest micro-batch again, in memory that the others have
            fragmented.
        warmup_micro_batches: fewest typical micro-batches before timing starts.
        min_micro_batches: fewest typical micro-batches that are timed.
        max_micro_batches: most typical micro-batches that are timed, though always two whole steps.
        min_seconds: timing continues for at least this many seconds: a few micro-batches of a small model end before
            caches are warm.
        max_seconds: timing ends after this many seconds once ``min_micro_batches`` are done.
        target_error: timing ends when the relative standard errors of the time of a step and of the token rate are both
            at or below this.
        saves: whether it saves a checkpoint at the end, though to no disk. That copies weights and state to the host.
        rate_to_beat: tokens per second of all processes together, such as those of the best candidate so far: timing
            ends early once the rate is almost certainly below. None: it does not.
        latest_seconds: timing ends with however few micro-batches once this much of the probe has passed, so that a
            time limit does not cost the whole measurement. None: it does not.
    """

    whole_steps: bool = False
    timing_only: bool = False
    worst_last: bool = False
    warmup_micro_batches: int = 2
    min_micro_batches: int = 6
    max_micro_batches: int = 400
    min_seconds: float = 0.0
    max_seconds: float = 10.0
    target_error: float = 0.03
    saves: bool = False
    rate_to_beat: float | None = None
    latest_seconds: float | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """Where memory ran out.

    Attributes:
        phase: phase of the step program, such as ``backward``.
        requested_bytes: size of the allocation that failed, or None if the allocator did not report it.
        held_bytes: the most that the process held above its baseline until then, or None.
        limit_bytes: the limit that was exceeded, or None if the device itself was full. If the host's memory runs out
            in training on a GPU, only the phase is known.
    """

    phase: str
    requested_bytes: int | None
    held_bytes: int | None
    limit_bytes: int | None

    @property
    def wanted_bytes(self) -> int | None:
        """Memory of the process with the failed allocation; None if the process's memory is not known."""
        return None if self.held_bytes is None else self.held_bytes + (self.requested_bytes or 0)


class HeldMemory:
    """The figures of a run's memory, as :class:`Measurement` defines them."""

    peak_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None

    @property
    def held_bytes(self) -> int | None:
        """The memory that has to fit the budget: all of a process on its GPU, or on a CPU its peak."""
        return self.device_bytes or self.reserved_bytes or self.peak_bytes


@dataclass(frozen=True)
class Measurement(HeldMemory):
    """The measurement of one probe; every figure that was not measured is None.

    Attributes:
        status: its outcome.
        reason: why it did not end ``ok``, in words; empty otherwise.
        peak_bytes: CUDA: peak of allocated bytes. CPU: high-water of anonymous resident memory (mapped files left out)
            above the baseline taken after imports.
        reserved_bytes: CUDA: peak of bytes reserved by the caching allocator. CPU: None.
        device_bytes: CUDA: what the process held of the device: context and peak of reserved bytes, or, if more, what
            the driver reports at the end. CPU: None, as in early results where the driver had no figure.
        host_peak_bytes: high-water of anonymous resident memory on the host, as for ``peak_bytes``; beside a GPU with
            shared mappings, as pinned memory is, and None where the kernel counts none. Of several processes, the sum.
        allocation_retries: number of times that the caching allocator had to free its cache and try again.
        tokens_per_second: dataset tokens of a mean optimizer step, padding excluded, over ``step_seconds``.
        tokens_per_second_error: relative standard error of that rate within this probe. It does not include the spread
            between two probes of one candidate.
        step_seconds: wall clock of a mean optimizer step: all its micro-batches, and the rest of it once.
        micro_batch_seconds: part of it for one micro-batch: its data, forward and backward.
        update_seconds: part of it for the rest: gradient clipping, the optimizer, and what the trainer does at its end.
        loading_seconds: part of it for reading and collating the data of all micro-batches, while the device waits.
        generation_seconds: part of it for generating completions and all that comes with them; 0 for a trainer that
            generates none.
        generation_phases: parts of that by the name of the phase; the rest is tokenising, padding and decoding.
        micro_batches_timed: typical micro-batches that were timed.
        tokens_per_step: mean dataset tokens of an optimizer step.
        documents_per_step: mean dataset rows whose tokens an optimizer step holds.
        rows: rows that the trainer iterates over in an epoch, after packing and dropping.
        worst_rows, worst_tokens: rows and tokens, padding included, of the largest micro-batch that was run.
        start_seconds: time from the request to the first training step.
        training_seconds: time inside training steps, warm-up and worst batch included.
        wall_seconds: time from the request to the reply.
        out_of_memory: where memory ran out, for the two out-of-memory statuses.
        peaks: for each completed phase of the step program, the most bytes that the device held above the baseline
            during it; for micro-batches and optimizer steps, the maximum over all of them.
        pass_seconds: time that phases that run once take for the whole dataset, such as the reference model's pass over
            all rows; 0 if there are none. ``tokens_per_second`` spreads them over all epochs.
        evaluation_seconds: time of an evaluation on all its rows, which ``tokens_per_second`` leaves out; None without.
    """

    status: ProbeStatus
    reason: str = ""
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    host_peak_bytes: int | None = None
    allocation_retries: int | None = None
    tokens_per_second: float | None = None
    tokens_per_second_error: float | None = None
    step_seconds: float | None = None
    micro_batch_seconds: float | None = None
    update_seconds: float | None = None
    loading_seconds: float | None = None
    micro_batches_timed: int = 0
    tokens_per_step: float | None = None
    documents_per_step: float | None = None
    rows: int | None = None
    worst_rows: int | None = None
    worst_tokens: int | None = None
    start_seconds: float | None = None
    training_seconds: float | None = None
    wall_seconds: float = 0.0
    out_of_memory: OutOfMemory | None = None
    pass_seconds: float = 0.0
    evaluation_seconds: float | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)
    generation_seconds: float = 0.0
    generation_phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the candidate ran to the end."""
        return self.status is ProbeStatus.OK

    @property
    def need_bytes(self) -> int | None:
        """Memory that the run needed of the limit; after an out-of-memory, with the failed request."""
        wanted = self.out_of_memory.wanted_bytes if self.out_of_memory is not None else None
        return wanted if wanted is not None else self.held_bytes


_MOST = ("peak_bytes", "reserved_bytes", "device_bytes", "allocation_retries", "worst_tokens",
         "step_seconds", "micro_batch_seconds", "update_seconds", "loading_seconds", "start_seconds",
         "training_seconds", "tokens_per_second_error", "evaluation_seconds")  # fmt: skip
_SUM = ("tokens_per_step", "documents_per_step", "host_peak_bytes")


def of_ranks(ranks: Sequence[Measurement]) -> Measurement:
    """Return the measurement of a training from those of its processes, in the order of their ranks.

    The status is that of the first rank that did not end ``ok``. Memory is that of the rank that needs the most, since
    each rank has its own device; that of the host is what all need together, at most, since they share it. A step takes
    as long as on the slowest rank, and trains on the tokens of all ranks.

    Args:
        ranks: measurements by rank; not empty.
    """
    failed = next((shown for shown in ranks if not shown.ok), None)
    if failed is not None or len(ranks) == 1:
        return failed or ranks[0]
    found = replace(
        ranks[0],
        **{name: _joined(max, ranks, name) for name in _MOST},
        **{name: _joined(sum, ranks, name) for name in _SUM},
        peaks={phase: max(shown.peaks.get(phase, 0) for shown in ranks) for phase in ranks[0].peaks},
        pass_seconds=max(shown.pass_seconds for shown in ranks),
    )
    if found.tokens_per_step is None or not found.step_seconds:
        return found
    # The time of phases that run once is spread over the steps of all epochs, as each rank did for itself.
    spread = max(_spread_seconds(shown) for shown in ranks)
    return replace(found, tokens_per_second=found.tokens_per_step / (found.step_seconds + spread))


def _spread_seconds(shown: Measurement) -> float:
    if not shown.tokens_per_second or shown.tokens_per_step is None or shown.step_seconds is None:
        return 0.0
    return max(0.0, shown.tokens_per_step / shown.tokens_per_second - shown.step_seconds)


def _joined(join: Callable[[list[Any]], Any], ranks: Sequence[Measurement], name: str) -> Any:
    known = [figure for shown in ranks if (figure := getattr(shown, name)) is not None]
    return join(known) if known else None
