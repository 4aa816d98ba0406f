"""A stand-in for traces on several GPUs of different speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autotune.core.jobs.traced import GpuFigures, Replayed, TraceReply, TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import StepTime
from autotune.probing.tracing import Traced
from tests.app.test_last_resort import OffloadingTracer

BANDWIDTH = 1e12
"""Bytes per second of the GPU on which steps take the time of the formula."""


class FollowingTracer(OffloadingTracer):
    """The stand-in for traces, on GPUs that are the faster the larger their bandwidth, and share all memory equally."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Answer requests."""
        for request, reply in zip(requests, super().__call__(requests), strict=True):
            assert isinstance(reply, TraceReply)
            yield _shared(reply, request.plan.launch.processes)


def _shared(reply: TraceReply, ranks: int) -> TraceReply:
    return replace(
        reply,
        sections=tuple(
            replace(item, levels={name: tuple(size // ranks for size in sizes) for name, sizes in item.levels.items()})
            for item in reply.sections
        ),
        gpus=tuple(_figures(figures, ranks) for figures in reply.gpus),
    )


def _figures(figures: GpuFigures, ranks: int) -> GpuFigures:
    speeds = figures.speeds
    times = [StepTime(time.seconds * BANDWIDTH / speeds.bandwidth, 0, 0, 0, 0, 0) if time and speeds else None
             for time in figures.times]  # fmt: skip
    replays = [
        Replayed(
            each.allocated_bytes // ranks,
            (each.reserved_bytes or 0) // ranks,
            (each.needed_bytes or 0) // ranks,
        )
        for each in figures.replays
    ]
    return replace(figures, times=tuple(times), replays=tuple(replays))


class CrowdedTracer(FollowingTracer):
    """The stand-in on GPUs that are four times as fast where a plan leaves them room."""

    def __init__(self, leaves_room: Callable[[TrainingPlan], bool]) -> None:
        super().__init__()
        self._leaves_room = leaves_room

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Answer requests."""
        for request, reply in zip(requests, super().__call__(requests), strict=True):
            assert isinstance(reply, TraceReply)
            faster = 4 if self._leaves_room(request.plan) else 1
            yield replace(reply, gpus=tuple(_faster(figures, faster) for figures in reply.gpus))


def _faster(figures: GpuFigures, times: int) -> GpuFigures:
    return replace(figures, times=tuple(time and replace(time, seconds=time.seconds / times) for time in figures.times))
