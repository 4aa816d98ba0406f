"""The measurement of one probe, the schedule by which it runs, and the combination of its ranks' measurements."""

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
        timing_only: whether only time is measured: the run begins with the largest micro-batch, does not repeat it once
            gradients and optimizer state exist, and does not evaluate.
        worst_last: whether the last step ends with the largest micro-batch again, in fragmented memory.
        warmup_micro_batches: minimum number of typical micro-batches before timing starts.
        min_micro_batches: minimum number of typical micro-batches to time.
        max_micro_batches: maximum number of typical micro-batches to time; two whole steps are always timed.
        min_seconds: minimum time of timing: a few micro-batches of a small model end before caches are warm.
        max_seconds: time after which timing ends once ``min_micro_batches`` are done.
        target_error: timing ends when the relative standard errors of the time of a step and of the token rate are both
            at or below this.
        saves: whether it saves a checkpoint at the end, which copies weights and state to the host, but not to a disk.
        rate_to_beat: tokens per second of all processes together, such as those of the best candidate so far: timing
            ends early once the rate is almost certainly lower. None: no early end.
        latest_seconds: time of the probe after which timing ends with any number of micro-batches, so that a time limit
            does not cost the whole measurement. None: no such end.
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
        used_bytes: peak memory of the process above its baseline until then, or None.
        limit_bytes: the exceeded limit, or None if the device itself was full. If the host's memory runs out in
            training on a GPU, only the phase is known.
    """

    phase: str
    requested_bytes: int | None
    used_bytes: int | None
    limit_bytes: int | None

    @property
    def attempted_bytes(self) -> int | None:
        """Memory of the process including the failed allocation; None if the process's memory is not known."""
        return None if self.used_bytes is None else self.used_bytes + (self.requested_bytes or 0)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory figures of a run; those that were not measured are None.

    Attributes:
        peak_bytes: CUDA: peak of allocated bytes. CPU: peak of anonymous resident memory (without mapped files) above
            the baseline taken after imports.
        reserved_bytes: CUDA: peak of bytes reserved by the caching allocator. CPU: None.
        device_bytes: CUDA: device memory of the process: context and peak of reserved bytes, or, if more, the driver's
            figure at the end. CPU: None, as in early results without the driver's figure.
    """

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def used_bytes(self) -> int | None:
        """The memory that must fit the budget: all of a process on its GPU, or on a CPU its peak."""
        return self.device_bytes or self.reserved_bytes or self.peak_bytes


@dataclass(frozen=True)
class Measurement(MemoryUse):
    """The measurement of one probe; figures that were not measured are None.

    Attributes:
        status: its outcome.
        reason: why it did not end ``ok``; empty otherwise.
        tokens_per_second: dataset tokens of a mean optimizer step, padding excluded, over ``step_seconds``.
        tokens_per_second_error: relative standard error of that rate within this probe. It does not include the spread
            between two probes of one candidate.
        step_seconds: wall-clock time of a mean optimizer step: all its micro-batches and one update.
        micro_batch_seconds: part of it for one micro-batch: its data, forward and backward.
        update_seconds: part of it for the update: gradient clipping, the optimizer, and the trainer's work at its end.
        loading_seconds: part of it for reading and collating the data of all micro-batches, while the device waits.
        generation_seconds: part of it for generating completions, tokenising and padding included; 0 for a trainer
            that generates none.
        generation_phases: parts of that by the name of the phase; the rest is tokenising, padding and decoding.
        micro_batches_timed: typical micro-batches that were timed.
        tokens_per_step: mean dataset tokens of an optimizer step.
        documents_per_step: mean dataset rows of an optimizer step.
        rows: rows that the trainer iterates over in an epoch, after packing and dropping.
        worst_rows, worst_tokens: rows and tokens, padding included, of the largest micro-batch that ran.
        start_seconds: time from the request to the first training step.
        training_seconds: time inside training steps, warm-up and worst batch included.
        wall_seconds: time from the request to the reply.
        out_of_memory: where memory ran out, for the two out-of-memory statuses.
        peaks: peak bytes on the device above the baseline in each completed phase of the step program; for
            micro-batches and optimizer steps, the maximum over all of them.
        pass_seconds: time of phases that run once over the whole dataset, such as the reference model's pass; 0 without
            any. ``tokens_per_second`` spreads it over all epochs.
        evaluation_seconds: time of an evaluation on all its rows, which ``tokens_per_second`` excludes; None without.
        unexplained: whether another process ended it, for a reason that is not known.
    """

    status: ProbeStatus
    reason: str = ""
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
    unexplained: bool = False

    @property
    def ok(self) -> bool:
        """Whether the candidate ran to the end."""
        return self.status is ProbeStatus.OK

    @property
    def need_bytes(self) -> int | None:
        """Memory that counts towards the limit; after an out-of-memory error, including the failed request."""
        attempted = self.out_of_memory.attempted_bytes if self.out_of_memory is not None else None
        return attempted if attempted is not None else self.used_bytes


_MAXIMA = ("peak_bytes", "reserved_bytes", "device_bytes", "worst_tokens",
         "step_seconds", "micro_batch_seconds", "update_seconds", "loading_seconds", "start_seconds",
         "training_seconds", "tokens_per_second_error", "evaluation_seconds")  # fmt: skip
_SUMS = ("tokens_per_step", "documents_per_step")


def combine_ranks(ranks: Sequence[Measurement]) -> Measurement:
    """Return the measurement of a training from those of its processes, in the order of their ranks.

    If a rank did not end ``ok``, its measurement is returned. Memory is that of the rank that needs the most. A step
    takes as long as on the slowest rank, and trains on the tokens of all ranks.

    Args:
        ranks: measurements by rank; not empty.
    """
    failed = next((shown for shown in ranks if not shown.ok), None)
    if failed is not None or len(ranks) == 1:
        return failed or ranks[0]
    found = replace(
        ranks[0],
        **{name: _combine(max, ranks, name) for name in _MAXIMA},
        **{name: _combine(sum, ranks, name) for name in _SUMS},
        peaks={phase: max(shown.peaks.get(phase, 0) for shown in ranks) for phase in ranks[0].peaks},
        pass_seconds=max(shown.pass_seconds for shown in ranks),
    )
    if found.tokens_per_step is None or not found.step_seconds:
        return found
    # The time of phases that run once is spread over the steps of all epochs, as each rank did for itself.
    spread = max(_one_off_seconds(shown) for shown in ranks)
    return replace(found, tokens_per_second=found.tokens_per_step / (found.step_seconds + spread))


def _one_off_seconds(shown: Measurement) -> float:
    if not shown.tokens_per_second or shown.tokens_per_step is None or shown.step_seconds is None:
        return 0.0
    return max(0.0, shown.tokens_per_step / shown.tokens_per_second - shown.step_seconds)


def _combine(join: Callable[[list[Any]], Any], ranks: Sequence[Measurement], name: str) -> Any:
    known = [figure for shown in ranks if (figure := getattr(shown, name)) is not None]
    return join(known) if known else None
