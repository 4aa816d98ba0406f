"""The forecast of memory and time for one depth and shape, and the memory that a device needs for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter, mul

from autotune.core.estimate import FRAGMENTATION, MemoryEstimate
from autotune.core.gpu import Gpu
from autotune.core.machine import DeviceKind
from autotune.core.program import OPTIMIZER_STEP
from autotune.core.step_time import HOST_BOUND_ERROR, TIME_ERROR, StepTime
from autotune.core.timeline import Occurrence, Part
from autotune.trainers.prompts import GENERATION, SYNCHRONISATION
from autotune.units import MIB

_NAMES = tuple(field.name for field in fields(StepTime))
_figures = attrgetter(*_NAMES)


def mixed_times(terms: Sequence[tuple[StepTime, float]]) -> StepTime:
    """Return the weighted sum of times; negative figures become 0.

    The busy times of device, links and host are sums over operators, so they scale with sizes and layers. The total
    does not: if small traces are bound by the links and a larger one by compute, the weighted sum of totals is too
    small. So the total is at least the largest busy time.
    """
    weights = [weight for _, weight in terms]
    columns = zip(*[_figures(time) for time, _ in terms], strict=True)
    sums = {name: max(0.0, sum(map(mul, weights, column))) for name, column in zip(_NAMES, columns, strict=True)}
    found = StepTime(**sums)
    return replace(found, seconds=max(found.seconds, found.busiest_seconds))


Stretch = tuple[Part, bool]
"""A part of a step, and whether it is its backward pass."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory and time of a step at one depth and shape.

    Attributes:
        stretches: peak bytes of tensors in each stretch of a step, by category.
        rounding_share: allocated bytes beyond tensor bytes, as a share of tensor bytes.
        workspace_bytes: allocated bytes beyond tensor bytes that do not depend on their size.
        unused_bytes: reserved minus allocated bytes.
        returned_bytes: the part of the unused bytes that is released on a device that is short of memory.
        host_bytes: peak bytes on the host.
        machine_bytes: the same, summed over all processes of a machine.
        times: the time of each part of a step; empty if speeds are unknown.
        between: the occurrence of the micro-batch that represents those between the first and the last of a step.
    """

    stretches: Mapping[Stretch, Mapping[str, int]]
    rounding_share: float
    workspace_bytes: int
    unused_bytes: int
    returned_bytes: int
    host_bytes: int
    machine_bytes: int
    times: Mapping[Part, StepTime]
    between: Occurrence = Occurrence.FURTHER

    @cached_property
    def categories(self) -> Mapping[str, int]:
        """The bytes of tensors at the peak, by category."""
        return max(self.stretches.values(), key=lambda levels: sum(levels.values()), default={})

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of tensors."""
        return sum(self.categories.values())

    @property
    def overhead_bytes(self) -> int:
        """The allocator's bytes beyond :attr:`peak_bytes`: rounding, and workspaces of libraries."""
        return self.workspace_bytes + round(self.rounding_share * self.peak_bytes)

    @property
    def reserved_bytes(self) -> int:
        """The reserved bytes of the caching allocator."""
        return self.peak_bytes + self.overhead_bytes + self.unused_bytes

    def step(self, micro_batches: int) -> StepTime | None:
        """Return the time of an optimizer step of that many micro-batches, or None if times are not known."""
        if not self.times:
            return None
        return mixed_times([(time, self.repeats(part, micro_batches)) for part, time in self.times.items()])

    def step_seconds(self, micro_batches: int) -> float | None:
        """Return the seconds of an optimizer step of that many micro-batches, or None if times are not known."""
        time = self.step(micro_batches)
        return None if time is None else time.seconds

    def repeats(self, part: Part, micro_batches: int) -> int:
        """Return how often the time of a part counts in an optimizer step of ``micro_batches`` micro-batches.

        A pass over the dataset before the first step is divided among the micro-batches (:meth:`spread`). Evaluation
        and saving do not count.
        """
        if part.occurrence is self.between:
            # Beside it, a step of several has one micro-batch of the other occurrence.
            return micro_batches - 1 if micro_batches > 1 or self.between is Occurrence.FURTHER else 1
        return {Occurrence.BEFORE: micro_batches, Occurrence.AFTER: 0}.get(part.occurrence, 1)

    def spread(self, pass_share: float) -> Forecast:
        """Return this forecast with the time of passes before training, such as a reference's, divided among steps.

        Args:
            pass_share: number of the pass's micro-batches per trained micro-batch.
        """
        times = {
            part: mixed_times([(time, pass_share)]) if part.occurrence is Occurrence.BEFORE else time
            for part, time in self.times.items()
        }
        return replace(self, times=times)

    def taking(self, phase: str, other: Forecast, per_step: float) -> Forecast:
        """Return this forecast with a phase replaced by that of another forecast, made for the phase's own size.

        Args:
            per_step: number of runs of the phase per optimizer step.
        """
        taken = {stretch: levels for stretch, levels in other.stretches.items() if stretch[0].phase == phase}
        # In the order of the parts, those of this forecast first.
        kept = (stretch for stretch in self.stretches if stretch[0].phase != phase or stretch in taken)
        stretches = {**{stretch: self.stretches[stretch] for stretch in kept}, **taken}
        times = {
            part: time if part.phase != phase else mixed_times([(other.times.get(part, time), per_step)])
            for part, time in self.times.items()
        }
        found = replace(self, stretches=stretches, times=times)
        totals = [sum(levels.values()) for stretch, levels in stretches.items() if stretch[0].phase == phase]
        # The unused bytes are those of the forecast with the peak.
        if found.peak_bytes not in totals:
            return found
        return replace(found, unused_bytes=other.unused_bytes, returned_bytes=other.returned_bytes)


def mean_times(forecasts: Sequence[tuple[Forecast, float]]) -> Forecast:
    """Return the first of some forecasts with the weighted mean of the times of all in a step.

    Args:
        forecasts: each with its weight. The weights sum to 1, or less if sizes are timed by larger ones; then they are
            normalised for the optimizer, whose time does not depend on the size.
    """
    first, whole = forecasts[0][0], sum(weight for _, weight in forecasts)
    times = {}
    for part in first.times:
        if part.occurrence is Occurrence.AFTER:
            continue
        scale = whole if part.phase == OPTIMIZER_STEP else 1.0
        times[part] = mixed_times([(found.times[part], weight / scale) for found, weight in forecasts])
    return replace(first, times=times)


TRACED_ERROR = 0.10
"""Error of a traced estimate, as a share. Traced tensor bytes are within 3 % on the CPU, and extrapolated ones within
0.5 % of full-size traces; extrapolated reserved bytes of the caching allocator are within 10 % on small models and
within 5 % on an 8B shape. Of 73 published GPU runs (benchmarks/published), whole traces were up to 9.3 % above and up
to 16.9 % below; those below by more than this error are within it once ``MemoryEstimate.varied_bytes`` is added."""

_OUTLIER = "outlier"
"""Category whose bytes may be zero or twice as many: :class:`autotune.virtual.records.Category`."""

PROCESS_BYTES = 128 * MIB
_PROCESS_SHARE = 0.25
"""Upper bound of what a process on a CPU holds in addition to tensors: this share of them, at most so many bytes.

Measured in real probes as the most that was mapped (VmData, less what each step started with), less the traced peak of
tensors, on 2 threads in float32: a model of 2 layers, 64 wide: 6 MiB with 40 of tensors, and 20 with 153; a
Llama of 13M parameters: 126 MiB with 519, and 89 with 1,389."""


def memory_estimate(
    worst: Forecast, typical: Forecast, micro_batches: int, device: Gpu | None, kind: DeviceKind
) -> MemoryEstimate:
    """Return the estimate for a GPU, or for a CPU and its allocator.

    Args:
        worst: forecast of the largest micro-batch, which gives the memory.
        typical: forecast of a typical one, which gives the time.
        micro_batches: number per optimizer step.
        device: None only for a CPU for which only tensors count. For another CPU, ``context_bytes`` is the expected
            maximum that a process holds in addition to its tensors; small models hold less.
    """
    gpu = None if kind == "cpu" else device
    time = typical.step(micro_batches)
    process_bytes = 0 if device is None else device.context_bytes
    peak_bytes = worst.peak_bytes + (worst.overhead_bytes if gpu is not None else 0)
    reserved_bytes = peak_bytes + worst.unused_bytes if gpu is not None else None
    context_bytes = gpu.context_bytes if gpu is not None else min(process_bytes, round(_PROCESS_SHARE * peak_bytes))
    extra = {
        "rounding": peak_bytes - worst.peak_bytes,
        FRAGMENTATION: reserved_bytes - peak_bytes if reserved_bytes is not None else 0,
        "context" if gpu is not None else "process": context_bytes,
    }
    found = MemoryEstimate(
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        context_bytes=context_bytes,
        breakdown={**worst.categories, **{name: size for name, size in extra.items() if size}},
        host_bytes=worst.host_bytes,
        machine_bytes=worst.machine_bytes,
        step_seconds=None if time is None else time.seconds,
        error=TRACED_ERROR,
        time_error=None if time is None or gpu is None else _time_error(time, gpu),
        returned_bytes=worst.returned_bytes if gpu is not None else 0,
        generation_bytes=_held_bytes(worst, GENERATION, gpu),
        synchronisation_bytes=_held_bytes(worst, SYNCHRONISATION, gpu),
    )
    unknown_bytes = worst.categories.get(_OUTLIER, 0)
    return replace(found, error=found.error + unknown_bytes / found.device_bytes) if unknown_bytes else found


def _time_error(time: StepTime, gpu: Gpu) -> float:
    """Return the relative error of a time, which is larger for host-bound steps if the host was not measured."""
    measured = gpu.speeds is not None and gpu.speeds.launch_seconds is not None
    return HOST_BOUND_ERROR if time.host_bound and not measured else TIME_ERROR


def _held_bytes(worst: Forecast, phase: str, gpu: Gpu | None) -> int | None:
    """Return the peak bytes of the device during a phase; None if there is no such phase."""
    held = [sum(levels.values()) for (part, _), levels in worst.stretches.items() if part.phase == phase]
    if not held:
        return None
    extra = 0 if gpu is None else round(worst.rounding_share * max(held)) + worst.workspace_bytes + gpu.context_bytes
    return max(held) + extra
