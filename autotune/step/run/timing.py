"""Estimates the time of a whole step and its error from timed micro-batches, and decides when to stop timing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autotune.core.measurement import Schedule
from autotune.core.spread import student_t

_Vector = npt.NDArray[np.float64]

_SIGNIFICANT_ERRORS = 2.0
"""Standard errors above which the special micro-batch gets a constant: fitting a zero wastes half of the micro-batches.

If the constant is about that large, the reported error is up to a fifth too small, since it ignores the selection.
"""

_MIN_TIMED_TO_BE_BEATEN = 3
"""Minimum number of timed micro-batches before a candidate is considered beaten."""

_BEATEN_ERRORS = 3.0
"""Standard errors by which the rate of a beaten candidate is below the rate to beat, for many micro-batches. The error
is at least the schedule's target. For few micro-batches, whose error may be small by chance, the factor grows as
Student's t with the degrees of freedom of a line's residuals."""

_MANY_DEGREES_OF_FREEDOM = 100
"""Degrees of freedom from which on Student's t hardly changes."""

_MAX_WORK_EXPONENT = 2
"""The work of a micro-batch grows at most with this power of its tokens."""


@dataclass(frozen=True)
class TimedMicroBatch:
    """One timed micro-batch.

    Attributes:
        seconds: time of its data loading, forward and backward pass.
        collated: tokens, padding included.
        special: whether it is the special micro-batch of its step (:attr:`WholeStep.special`).
        loading_seconds: part of the time, for its data loading.
    """

    seconds: float
    collated: int
    special: bool
    loading_seconds: float = 0.0


@dataclass(frozen=True)
class TimedGeneration:
    """One timed generation of completions.

    Attributes:
        seconds: time until the first micro-batch can be trained on them.
        phases: seconds by phase; the rest is tokenising, padding and decoding.
    """

    seconds: float
    phases: Mapping[str, float]


@dataclass
class Timings:
    """The timings of a probe.

    Attributes:
        micro_batches: in order.
        updates: seconds outside of micro-batches, of each step with timed micro-batches.
        generations: in order; their time is not part of ``micro_batches``.
    """

    micro_batches: list[TimedMicroBatch] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    generations: list[TimedGeneration] = field(default_factory=list)


@dataclass(frozen=True)
class WholeStep:
    """The composition of a step of the plan.

    Attributes:
        micro_batches: number of micro-batches.
        mean_collated: mean tokens of a micro-batch, padding included.
        generations: mean number of generations of completions.
        tokens: mean dataset tokens of all processes together, padding excluded; 0: unknown.
        special: index in a step of the micro-batch with additional work: 0, the first one, which allocates gradients
            while all others accumulate into them, or -1, the last one, which reduces the gradients of all processes
            (``Accelerator.no_sync``; ZeRO-1: ``DeepSpeedEngine.allreduce_gradients``).
    """

    micro_batches: int
    mean_collated: float
    generations: float = 0.0
    tokens: float = 0.0
    special: int = 0

    def phases(self, generations: Sequence[TimedGeneration]) -> dict[str, float]:
        """Return the seconds of each phase of generations in an optimizer step; empty without a generation."""
        totals: dict[str, float] = {}
        for generation in generations:
            for name, seconds in generation.phases.items():
                totals[name] = totals.get(name, 0.0) + seconds
        return {name: seconds / len(generations) * self.generations for name, seconds in totals.items()}


@dataclass(frozen=True)
class Timing:
    """The estimated time of a whole step.

    Attributes:
        step_seconds: mean time of a whole step.
        update_seconds: its part that is spent once per step: gradient clipping, the optimizer, the trainer's own work.
        micro_batch_seconds: its part for a mean micro-batch.
        generation_seconds: its part for generating completions.
        loading_seconds: its part for loading the data of all micro-batches.
        error: relative standard error of ``step_seconds``, or None with too few observations.
    """

    step_seconds: float
    update_seconds: float
    micro_batch_seconds: float
    generation_seconds: float
    loading_seconds: float
    error: float | None


def estimate_timing(timed: Timings, step: WholeStep) -> Timing:
    """Return the time of a whole step, composed of micro-batches, generations and the update.

    Micro-batches differ in size, and few of them are timed. Their times are therefore regressed on their tokens, and
    the line gives the time of the mean micro-batch: the linear regression estimator of a mean whose covariate's mean is
    known (Cochran, Sampling Techniques, 3rd edition, chapter 7). The special micro-batch of a step gets an additive
    constant if that differs significantly from zero. If the line is implausible, the mean of the times is taken.

    Args:
        timed: at least one timing of each part of a step.
        step: the composition of the step.
    """
    micro_batches, updates = timed.micro_batches, timed.updates
    seconds = np.array([item.seconds for item in micro_batches])
    columns = [np.ones(len(seconds))]
    point = [float(step.micro_batches)]
    distances = np.array([item.collated / step.mean_collated - 1.0 for item in micro_batches])
    if np.ptp(distances) > 0 and len(seconds) > len(columns) + 1 and _is_plausible(columns[0], distances, seconds):
        columns.append(distances)
        point.append(0.0)
    special = np.array([float(item.special) for item in micro_batches])
    if np.ptp(special) > 0 and len(seconds) > len(columns) + 1:
        constant, standard_error = _predict([*columns, special], seconds, [0.0] * len(columns) + [1.0])
        if standard_error is not None and abs(constant) > _SIGNIFICANT_ERRORS * standard_error:
            columns.append(special)
            point.append(1.0)
    all_micro_batches, error = _predict(columns, seconds, point)
    update = float(np.mean(updates))
    generation_seconds = np.array([one.seconds for one in timed.generations]) * step.generations
    generation = float(np.mean(generation_seconds)) if step.generations else 0.0
    step_seconds = all_micro_batches + update + generation
    if error is not None and len(updates) > 1 and (len(generation_seconds) > 1 or not step.generations):
        errors = [error, _mean_error(np.array(updates)), _mean_error(generation_seconds) if step.generations else 0.0]
        error = math.hypot(*errors) / step_seconds
    else:
        error = None
    # A share of the regressed time: the mean of the loading times may exceed it.
    loading = all_micro_batches * sum(item.loading_seconds for item in micro_batches) / float(np.sum(seconds))
    return Timing(step_seconds, update, all_micro_batches / step.micro_batches, generation, loading, error)


def _is_plausible(ones: _Vector, distances: _Vector, seconds: _Vector) -> bool:
    """Whether the regression's time of the mean micro-batch is possible for work that grows with its tokens.

    The work is constant, proportional to the tokens, or to their square (attention). So each measured time implies a
    range for the mean micro-batch. A line outside all ranges fits noise, such as one disturbed micro-batch among others
    of almost the same size.
    """
    mean_seconds, _ = _predict([ones, distances], seconds, [1.0, 0.0])
    largest_growth = (1.0 / (1.0 + distances)) ** _MAX_WORK_EXPONENT
    lowest = float(np.min(seconds * np.minimum(1.0, largest_growth)))
    highest = float(np.max(seconds * np.maximum(1.0, largest_growth)))
    return lowest <= mean_seconds <= highest


def _mean_error(seconds: _Vector) -> float:
    """Return the standard error of the mean of at least two observations."""
    return float(np.std(seconds, ddof=1)) / math.sqrt(len(seconds))


def is_enough(schedule: Schedule, timed: Timings, step: WholeStep, passed_seconds: float = 0.0) -> bool:
    """Whether the timed micro-batches satisfy the schedule.

    Args:
        passed_seconds: time since the probe began.
    """
    micro_batches, updates, generations = timed.micro_batches, timed.updates, timed.generations
    if not micro_batches or not updates or (step.generations and not generations):
        return False
    if schedule.latest_seconds is not None and passed_seconds >= schedule.latest_seconds:
        return True
    if _is_beaten(schedule, timed, step):
        return True
    if len(micro_batches) < schedule.min_micro_batches:
        return False
    spent_seconds = sum(item.seconds for item in micro_batches) + sum(one.seconds for one in generations) + sum(updates)
    if len(micro_batches) >= schedule.max_micro_batches or spent_seconds >= schedule.max_seconds:
        return True
    if spent_seconds < schedule.min_seconds:
        return False
    error = estimate_timing(timed, step).error
    return error is not None and error <= schedule.target_error


def _is_beaten(schedule: Schedule, timed: Timings, step: WholeStep) -> bool:
    """Whether the rate is below the one to beat by more than its error."""
    if schedule.rate_to_beat is None or len(timed.micro_batches) < _MIN_TIMED_TO_BE_BEATEN:
        return False
    estimate = estimate_timing(timed, step)
    error = max(schedule.target_error, estimate.error if estimate.error is not None else math.inf)
    errors = _BEATEN_ERRORS * student_t(len(timed.micro_batches) - 2) / student_t(_MANY_DEGREES_OF_FREEDOM)
    return step.tokens / estimate.step_seconds * (1 + errors * error) < schedule.rate_to_beat


def _predict(columns: Sequence[_Vector], seconds: _Vector, point: Sequence[float]) -> tuple[float, float | None]:
    """Return the least-squares prediction at ``point`` and its standard error, or None without degrees of freedom.

    The times of long micro-batches vary more than those of short ones, so the standard error is HC3, which allows for
    that in small samples (MacKinnon and White, Journal of Econometrics 29 (1985)).
    """
    matrix, at = np.stack(columns, axis=1), np.array(point)
    coefficients = np.linalg.lstsq(matrix, seconds, rcond=None)[0]
    if len(seconds) <= matrix.shape[1]:
        return float(at @ coefficients), None
    inverse = np.linalg.pinv(matrix.T @ matrix)
    leverages = np.einsum("ij,jk,ik->i", matrix, inverse, matrix)
    # An observation that alone determines a coefficient has no residual; its contribution is unknown.
    deleted_residuals = (seconds - matrix @ coefficients) / np.maximum(1 - leverages, 1e-9)
    return float(at @ coefficients), float(np.linalg.norm((matrix @ inverse @ at) * deleted_residuals))
