"""Forecast of a step's memory and time at full depth, and the memory estimate for a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from autotune.core.documents.estimate import FRAGMENTATION, MemoryEstimate
from autotune.core.gpu import Gpu
from autotune.core.machine import DeviceKind
from autotune.core.program import OPTIMIZER_STEP
from autotune.core.step_time import HOST_BOUND_ERROR, TIME_ERROR, StepTime
from autotune.core.timeline import Occurrence, Part
from autotune.trainers.prompts import GENERATION, SYNCHRONISATION
from autotune.units import MIB


def mixed_times(terms: Sequence[tuple[StepTime, float]]) -> StepTime:
    """Return the weighted sum of times; negative figures become 0.

    The busy times of device, links and host are sums over operators, so they are affine in sizes and layers. The total
    is not: if small traces are bound by the links and a larger one by compute, the weighted sum of totals is too small.
    So the total is at least the largest busy time.
    """
    names = [field.name for field in fields(StepTime)]
    mixed = StepTime(*(max(0.0, sum(weight * getattr(time, name) for time, weight in terms)) for name in names))
    return replace(mixed, seconds=max(mixed.seconds, mixed.busiest_seconds))


Figures = NDArray[np.float64]
Levels = Mapping[str, int]
"""Bytes by category at one moment, without those that have none."""
Indices = NDArray[np.intp]
Stretch = tuple[Part, bool]
"""A part of a step, and whether it is its backward pass."""


@dataclass(frozen=True)
class Aligned:
    """A stretch of the whole model's step, at the moments that all traces share.

    Example: traces of two and of three layers share the moments of two layers: the first two if aligned from the start,
    the last two if aligned from the end.

    Attributes:
        names: names of the moments, as in :class:`autotune.core.timeline.Section`.
        categories: PyTorch's categories of memory.
        start, end: extrapolated bytes, categories x moments, aligned from the start and from the end.
        layer_moments: number of moments of the additional layers, by which both alignments differ in the deeper trace;
            0 for a moment outside the layers.
        insertions: number of repetitions of the additional layers in the whole model.
        edges: periods of layers at either end that differ from those between, because weights are prefetched, or
            because activations stay until they are copied to the host. The first are aligned from the start only, and
            the last from the end.
    """

    names: Sequence[str]
    categories: Sequence[str]
    start: Figures
    end: Figures
    layer_moments: Sequence[int]
    insertions: int
    edges: int = 0

    @cached_property
    def highest(self) -> tuple[str, Levels]:
        """The name and the bytes of the moment with the most bytes."""
        moments, figures = self._whole(interpolated=False)
        highest = figures.sum(axis=0).argmax()
        return self.names[moments[highest]], self._levels(figures[:, highest])

    def course(self) -> list[Levels]:
        """Return the bytes at the moments of the stretch, in order."""
        _, figures = self._whole()
        return [self._levels(sizes) for sizes in figures.T]

    def _levels(self, sizes: Figures) -> Levels:
        return {name: round(size) for name, size in zip(self.categories, sizes, strict=True) if size}

    def _whole(self, *, interpolated: bool = True) -> tuple[Indices, Figures]:
        """Return the shared moment behind each moment of the whole stretch, and the bytes at each of these; with or
        without the interpolated moments between the first layers and the last, which are not above these."""
        first, last, shares = map(np.concatenate, zip(*self._pieces(interpolated=interpolated), strict=True))
        start = self.start[:, first]
        return last, np.maximum(0.0, np.floor(start + shares * (self.end[:, last] - start)))

    def _pieces(self, *, interpolated: bool) -> Iterator[tuple[Indices, Indices, Figures]]:
        """Yield for consecutive moments those aligned from the start and from the end, and the shares of the latter.

        The first layer is aligned from the start only: from the end, it is the second of the deeper trace, and their
        difference would count once per further layer.
        """
        for in_layers, run in groupby(range(len(self.layer_moments)), key=lambda each: self.layer_moments[each] > 0):
            moments = np.array([*run], dtype=np.intp)
            if not in_layers:
                yield moments, moments, np.zeros(len(moments))
                continue
            period = max(self.layer_moments[moment] for moment in moments)
            # Align at least one period from either side.
            most = max(0, len(moments) - period)
            last, first = (min(layers * period, most) for layers in (self.edges, max(1, self.edges)))
            start, end = moments[: len(moments) - last], moments[first:]
            yield start, start, np.zeros(len(start))
            if interpolated:
                added = np.arange(max(0, self.insertions * period + len(moments) - len(start) - len(end)))
                # `before` is shorter than a period if the added layer has more moments than the shallow trace's layer.
                before = start[-period:]
                alike = (end - before[:, None]) % period == 0
                place = added % len(before)
                high = np.where(alike.any(axis=1)[place], end[alike.argmax(axis=1)[place]], end[added % len(end)])
                yield before[place], high, (1 + added // period) / (1 + len(added) / period)
            yield end, end, np.ones(len(end))


@dataclass(frozen=True)
class Forecast:
    """Predicted memory and time of a step at one depth and shape.

    Attributes:
        stretches: memory of the whole model in each stretch of a step.
        rounding_share, workspace_bytes: allocated bytes beyond tensor bytes: as a share of these, and independent.
        unused_bytes: reserved minus allocated bytes.
        returned_bytes: the part of the unused bytes that is released on a device that is short of memory.
        host_bytes, machine_bytes: peak bytes on the host, of a process and of all processes of a machine.
        times: the time of each part of a step; empty if speeds are unknown.
        between: the occurrence of the micro-batch that represents those between the first and the last of a step.
    """

    stretches: Mapping[Stretch, Aligned]
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
        phases = ((part.phase, stretch.highest[1]) for (part, _), stretch in reversed([*self.stretches.items()]))
        return max(phases, key=lambda item: sum(item[1].values()), default=("", {}))

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of tensors."""
        return sum(self.highest[1].values())

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

    def repeats(self, part: Part, micro_batches: int) -> int:
        """Return how often the time of a part counts in an optimizer step: evaluation and saving do not."""
        if part.occurrence is self.between:
            # The remaining micro-batch of a step has the other occurrence.
            return micro_batches - 1 if micro_batches > 1 or self.between is Occurrence.FURTHER else 1
        return {Occurrence.BEFORE: micro_batches, Occurrence.AFTER: 0}.get(part.occurrence, 1)

    def with_phase(self, phase: str, other: Forecast, per_step: float) -> Forecast:
        """Return this forecast with a phase of another forecast, which has the phase's own micro-batch size.

        Args:
            per_step: number of runs of the phase per optimizer step.
        """
        replaced = {at: stretch for at, stretch in other.stretches.items() if at[0].phase == phase}
        # This forecast's stretches come first, in order.
        kept = {at: each for at, each in self.stretches.items() if at[0].phase != phase or at in replaced}
        times = {
            part: time if part.phase != phase else mixed_times([(other.times.get(part, time), per_step)])
            for part, time in self.times.items()
        }
        forecast = replace(self, stretches={**kept, **replaced}, times=times)
        # The unused bytes are those of the forecast with the peak.
        if forecast.highest[0] != phase:
            return forecast
        return replace(forecast, unused_bytes=other.unused_bytes, returned_bytes=other.returned_bytes)

    def with_higher(self, phase: str, other: Forecast) -> Forecast:
        """Return this forecast with the memory of a phase of another one, if that raises the peak; its time stays."""
        replaced = replace(self.with_phase(phase, other, 1.0), times=self.times)
        return replaced if replaced.peak_bytes > self.peak_bytes else self


def mean_times(forecasts: Sequence[tuple[Forecast, float]], pass_share: float) -> Forecast:
    """Return the first forecast with the weighted mean of all forecasts' times of a step.

    Args:
        forecasts: each with its weight. The weights sum to 1, or less if sizes are timed by larger ones; those of the
            optimizer's time are normalised.
        pass_share: micro-batches of a pass before training, such as a reference's, per trained micro-batch.
    """
    first, whole = forecasts[0][0], sum(weight for _, weight in forecasts)
    times = {}
    for part in first.times:
        if part.occurrence is Occurrence.AFTER:
            continue
        scale = whole if part.phase == OPTIMIZER_STEP else 1.0
        mean = mixed_times([(forecast.times[part], weight / scale) for forecast, weight in forecasts])
        times[part] = mixed_times([(mean, pass_share)]) if part.occurrence is Occurrence.BEFORE else mean
    return replace(first, times=times)


TRACED_ERROR = 0.10
"""Error of a traced estimate, as a share. Traced tensor bytes are within 3 % on the CPU, and extrapolated ones within
0.5 % of full-size traces; extrapolated reserved bytes of the caching allocator are within 10 % on small models and
within 5 % on an 8B shape. Of 73 published GPU runs (benchmarks/published), whole traces were up to 9.3 % above and up
to 16.9 % below; those below by more than this error are within it once ``MemoryEstimate.varied_bytes`` is added."""

_OUTLIER = "outlier"
"""Category whose bytes may be between zero and twice as many: :class:`autotune.virtual.recording.records.Category`."""

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
        micro_batches: number per optimizer step.
        device: None for a CPU of which only tensors count. For another CPU, its ``context_bytes`` is the expected
            maximum of a process's memory in addition to tensors; small models need less.
    """
    gpu = None if kind == "cpu" else device
    time = typical.step(micro_batches)
    phase, categories = worst.highest
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
        breakdown={**categories, **{name: size for name, size in extra.items() if size}},
        host_bytes=worst.host_bytes,
        machine_bytes=worst.machine_bytes,
        step_seconds=None if time is None else time.seconds,
        error=TRACED_ERROR,
        time_error=None if time is None or gpu is None else _time_error(time, gpu),
        returned_bytes=worst.returned_bytes if gpu is not None else 0,
        generation_bytes=_phase_bytes(worst, GENERATION, gpu),
        synchronisation_bytes=_phase_bytes(worst, SYNCHRONISATION, gpu),
        phase=phase,
    )
    unknown_bytes = categories.get(_OUTLIER, 0)
    return replace(memory, error=memory.error + unknown_bytes / memory.device_bytes) if unknown_bytes else memory


def _time_error(time: StepTime, gpu: Gpu) -> float:
    """Return the relative error of a time, which is larger for host-bound steps if the host was not measured."""
    measured = gpu.speeds is not None and gpu.speeds.launch_seconds is not None
    return HOST_BOUND_ERROR if time.host_bound and not measured else TIME_ERROR


def _phase_bytes(worst: Forecast, phase: str, gpu: Gpu | None) -> int | None:
    """Return the peak bytes of the device during a phase; None if there is no such phase."""
    totals = [sum(each.highest[1].values()) for (part, _), each in worst.stretches.items() if part.phase == phase]
    if not totals:
        return None
    extra = 0 if gpu is None else round(worst.rounding_share * max(totals)) + worst.workspace_bytes + gpu.context_bytes
    return max(totals) + extra
