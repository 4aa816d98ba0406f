"""Forecast of a step's memory and time at full depth, and the memory estimate for a device."""

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

    The busy times of device, links and host are sums over operators, so they are affine in sizes and layers. The total
    is not: if small traces are bound by the links and a larger one by compute, the weighted sum of totals is too small.
    So the total is at least the largest busy time.
    """
    weights = [weight for _, weight in terms]
    columns = zip(*[_figures(time) for time, _ in terms], strict=True)
    sums = {name: max(0.0, sum(map(mul, weights, column))) for name, column in zip(_NAMES, columns, strict=True)}
    mixed = StepTime(**sums)
    return replace(mixed, seconds=max(mixed.seconds, mixed.busiest_seconds))


Stretch = tuple[Part, bool]
"""A part of a step, and whether it is its backward pass."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory and time of a step at one depth and shape.

    Attributes:
        stretches: peak bytes of tensors in each stretch of a step, by category.
        rounding_share, workspace_bytes: allocated bytes beyond tensor bytes: as a share of these, and independent.
        unused_bytes: reserved minus allocated bytes.
        returned_bytes: the part of the unused bytes that is released on a device that is short of memory.
        host_bytes, machine_bytes: peak bytes on the host, of a process and of all processes of a machine.
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
    def highest(self) -> tuple[str, Mapping[str, int]]:
        """The phase with the peak, and the bytes of tensors there, by category; of equal peaks, the last one."""
        phases = ((part.phase, levels) for (part, _), levels in reversed([*self.stretches.items()]))
        return max(phases, key=lambda item: sum(item[1].values()), default=("", {}))

    @property
    def categories(self) -> Mapping[str, int]:
        """The bytes of tensors at the peak, by category."""
        return self.highest[1]

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
        times = [(time, self.repeats(part, micro_batches)) for part, time in self.times.items()]
        return mixed_times(times) if times else None

    def step_seconds(self, micro_batches: int) -> float | None:
        """Return the seconds of :meth:`step`."""
        time = self.step(micro_batches)
        return None if time is None else time.seconds

    def repeats(self, part: Part, micro_batches: int) -> int:
        """Return how often the time of a part counts in an optimizer step: evaluation and saving do not."""
        if part.occurrence is self.between:
            # The remaining micro-batch of a step has the other occurrence.
            return micro_batches - 1 if micro_batches > 1 or self.between is Occurrence.FURTHER else 1
        return {Occurrence.BEFORE: micro_batches, Occurrence.AFTER: 0}.get(part.occurrence, 1)

    def with_pass_share(self, pass_share: float) -> Forecast:
        """Return this forecast with passes before training, such as a reference's, divided among its micro-batches."""
        times = {
            part: mixed_times([(time, pass_share)]) if part.occurrence is Occurrence.BEFORE else time
            for part, time in self.times.items()
        }
        return replace(self, times=times)

    def with_phase(self, phase: str, other: Forecast, per_step: float) -> Forecast:
        """Return this forecast with a phase of another, which has its own micro-batch size and runs per step."""
        replaced = {stretch: levels for stretch, levels in other.stretches.items() if stretch[0].phase == phase}
        # This forecast's stretches come first, in order.
        kept = (stretch for stretch in self.stretches if stretch[0].phase != phase or stretch in replaced)
        stretches = {**{stretch: self.stretches[stretch] for stretch in kept}, **replaced}
        times = {
            part: time if part.phase != phase else mixed_times([(other.times.get(part, time), per_step)])
            for part, time in self.times.items()
        }
        forecast = replace(self, stretches=stretches, times=times)
        totals = [sum(levels.values()) for stretch, levels in stretches.items() if stretch[0].phase == phase]
        # The unused bytes are those of the forecast with the peak.
        if forecast.peak_bytes not in totals:
            return forecast
        return replace(forecast, unused_bytes=other.unused_bytes, returned_bytes=other.returned_bytes)


def mean_times(forecasts: Sequence[tuple[Forecast, float]]) -> Forecast:
    """Return the first forecast with the weighted mean of all forecasts' times of a step.

    The weights sum to 1, or less if sizes are timed by larger ones; those of the optimizer's time are normalised.
    """
    first, whole = forecasts[0][0], sum(weight for _, weight in forecasts)
    times = {}
    for part in first.times:
        if part.occurrence is Occurrence.AFTER:
            continue
        scale = whole if part.phase == OPTIMIZER_STEP else 1.0
        times[part] = mixed_times([(forecast.times[part], weight / scale) for forecast, weight in forecasts])
    return replace(first, times=times)


TRACED_ERROR = 0.10
"""Error of a traced estimate, as a share. Traced tensor bytes are within 3 % on the CPU, and extrapolated ones within
0.5 % of full-size traces; extrapolated reserved bytes of the caching allocator are within 10 % on small models and
within 5 % on an 8B shape. Of 73 published GPU runs (benchmarks/published), whole traces were up to 9.3 % above and up
to 16.9 % below; those below by more than this error are within it once ``MemoryEstimate.varied_bytes`` is added."""

_OUTLIER = "outlier"
"""Category whose bytes may be between zero and twice as many: :class:`autotune.virtual.records.Category`."""

PROCESS_BYTES = 128 * MIB
_PROCESS_SHARE = 0.25
"""Upper bound of a CPU process's memory in addition to tensors: this share of their bytes, at most ``PROCESS_BYTES``.

Measured in real probes as peak VmData minus VmData at the start of each step minus the traced peak of tensors, on 2
threads in float32: 6 MiB with 40 MiB of tensors and 20 with 153 for a model of 2 layers, 64 wide; 126 MiB with 519 and
89 with 1,389 for a Llama of 13M parameters."""


def memory_estimate(
    worst: Forecast, typical: Forecast, micro_batches: int, device: Gpu | None, kind: DeviceKind
) -> MemoryEstimate:
    """Return the estimate for a GPU, or for a CPU and its allocator.

    Args:
        worst, typical: forecasts of the largest micro-batch, for the memory, and of a typical one, for the time.
        device: None for a CPU of which only tensors count. For another CPU, its ``context_bytes`` is the expected
            maximum of a process's memory in addition to tensors; small models need less.
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
    memory = MemoryEstimate(
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
        generation_bytes=_phase_bytes(worst, GENERATION, gpu),
        synchronisation_bytes=_phase_bytes(worst, SYNCHRONISATION, gpu),
        phase=worst.highest[0],
    )
    unknown_bytes = worst.categories.get(_OUTLIER, 0)
    return replace(memory, error=memory.error + unknown_bytes / memory.device_bytes) if unknown_bytes else memory


def _time_error(time: StepTime, gpu: Gpu) -> float:
    """Return the relative error of a time, which is larger for host-bound steps if the host was not measured."""
    measured = gpu.speeds is not None and gpu.speeds.launch_seconds is not None
    return HOST_BOUND_ERROR if time.host_bound and not measured else TIME_ERROR


def _phase_bytes(worst: Forecast, phase: str, gpu: Gpu | None) -> int | None:
    """Return the peak bytes of the device during a phase; None if there is no such phase."""
    totals = [sum(levels.values()) for (part, _), levels in worst.stretches.items() if part.phase == phase]
    if not totals:
        return None
    extra = 0 if gpu is None else round(worst.rounding_share * max(totals)) + worst.workspace_bytes + gpu.context_bytes
    return max(totals) + extra
