"""Traces before the first probe, for a limited time, so that the search can veto candidates without probing them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.app.offload import notes_on_offloading, with_what_offloads
from autotune.app.options import Options
from autotune.app.requests import traces_of
from autotune.core.candidate import Candidate
from autotune.core.codec import DecodeError, decode, encode
from autotune.core.events import Event, Listener, Noted, StageStarted
from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.machine import Hardware, Machine
from autotune.core.memory_timeline import MemoryTimeline
from autotune.core.protocol import SpeedsRequest
from autotune.errors import AutotuneError
from autotune.inspection.gpus import described
from autotune.planning.candidates import estimated_candidates
from autotune.planning.climbing import climb
from autotune.planning.extrapolation.memory import PROCESS_BYTES
from autotune.planning.planner import Planner
from autotune.planning.predictor import PlannedPredictor
from autotune.planning.target import Accelerator
from autotune.planning.tracing.cache import Cache, fingerprint, user_cache
from autotune.planning.tracing.store import Tracer
from autotune.probing import JobServer, measure_speeds
from autotune.probing.tracing import ServerTracer
from autotune.space import SpaceFile
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_duration

# Technique combinations that are traced between two checks of the clock: as many as there may be tracing processes.
_AT_ONCE = 2
# Largest share of a search's time limit that tracing may take.
_LARGEST_SHARE = 0.1


@contextmanager
def predicting(
    problem: TrainerProblem, limit_bytes: int, options: Options, server: JobServer, listener: Listener
) -> Iterator[Ahead]:
    """Yield the predictions from the traces that fit into the time; the tracing processes run until the context ends.

    A tracing failure is reported and the search continues without predictions.

    Args:
        server: the probes' server, with whose threads the speeds of a CPU are measured.
    """
    listener(StageStarted("Tracing training steps without running them, to spare probes"))
    seconds = options.effort.planning_seconds
    if options.timeout_seconds is not None:
        seconds = min(seconds, options.timeout_seconds * _LARGEST_SHARE)
    hardware = problem.setting.machine.hardware
    lent = server if hardware.kind == "cpu" else None
    with ServerTracer(hardware.cores, _without_stages(listener), lent) as tracer:
        cache = user_cache()
        measured = partial(speeds_of, problem.setting.machine, server, tracer.folder, cache)
        yield traced_ahead(problem, limit_bytes, tracer, cache, measured, seconds, listener, options.file)


@dataclass(frozen=True)
class Ahead:
    """The result of tracing before a search.

    Attributes:
        predictor: predictions from the traces; None if nothing was traced.
        failure: why nothing was traced; empty otherwise.
        spent_seconds: time that tracing took.
        problem: what to search: with last resorts, if nothing is predicted to fit without; None: as it was.
    """

    predictor: PlannedPredictor | None = None
    planner: Planner | None = None
    failure: str = ""
    spent_seconds: float = 0.0
    problem: TrainerProblem | None = None

    def left_of(self, options: Options) -> Options:
        """Return the options with the time that tracing took subtracted from their time limit."""
        limit = options.timeout_seconds
        return options if limit is None else replace(options, timeout_seconds=max(0.0, limit - self.spent_seconds))

    def timelines(self, candidates: Sequence[Candidate], *, traces: bool) -> Mapping[Candidate, MemoryTimeline]:
        """Return the memory of candidates through one step, of those that can be estimated.

        Args:
            traces: whether to trace those that were not traced yet; only while the tracing processes run.
        """
        planner = self.planner
        if planner is None:
            return {}
        if traces:
            with suppress(AutotuneError):
                planner.trace(candidates)
        found = {candidate: planner.figures.timeline(candidate) for candidate in candidates}
        return {candidate: timeline for candidate, timeline in found.items() if timeline is not None}

    def notes(self) -> tuple[str, ...]:
        """Return notes on the predictions for the user, in sentences; called when the search has ended."""
        notes = list(self.predictor.notes()) if self.predictor else []
        notes += notes_on_offloading(self.problem) if self.problem is not None else []
        untraceable = self.planner.untraceable if self.planner else {}
        if untraceable:
            reason = next(iter(untraceable.values()))
            notes.append(f"{len(untraceable)} ways to train could not be traced and were not predicted: {reason}")
        if self.failure:
            notes.append(f"Nothing was predicted, and the search went on without: {self.failure}")
        return tuple(notes)


def traced_ahead(
    problem: TrainerProblem,
    limit_bytes: int,
    tracer: Tracer,
    cache: Cache,
    speeds: Callable[[], GpuSpeeds],
    seconds: float,
    listener: Listener,
    file: SpaceFile | None = None,
) -> Ahead:
    """Trace for at most that many seconds and return the result; longer if nothing fits but what offloads may.

    Args:
        file: the space, whose last resorts are traced if nothing else fits; None: they are not.
        speeds: measures the speeds of a CPU, since there is no catalogue of CPUs.
    """
    started = time.monotonic()
    setting = problem.setting
    machine, model = setting.machine, setting.workload.model
    traces = traces_of(setting.workload, machine, tracer, cache)

    def in_time() -> bool:
        return time.monotonic() - started < seconds

    try:
        target = target_of(machine.hardware, limit_bytes, speeds)
        planner = Planner(problem, target, traces, model.layer_kinds, estimated_candidates(problem))
        planner.explore(at_once=(_AT_ONCE,), goes_on=in_time)
        climb(problem, planner, at_once=_AT_ONCE, goes_on=in_time)
        if file is not None:
            problem, planner = with_what_offloads(problem, planner, file)
        predictor = PlannedPredictor(planner, limit_bytes, machine.hardware.kind)
    except AutotuneError as error:
        listener(Noted(f"Nothing is predicted: {error.message}"))
        return Ahead(failure=error.message, spent_seconds=time.monotonic() - started)
    predictions = [predictor.predict(candidate) for candidate in planner.candidates]
    known = [prediction for prediction in predictions if prediction is not None]
    over = sum(prediction.need_bytes > limit_bytes for prediction in known)
    spent_seconds = time.monotonic() - started
    spent = format_duration(spent_seconds)
    counted = f"{len(known):,} of {len(predictions):,} candidates are predicted, {over:,} not to fit"
    listener(Noted(f"Traced in {spent}: {counted}."))
    return Ahead(predictor, planner, spent_seconds=spent_seconds, problem=problem)


def target_of(hardware: Hardware, limit_bytes: int, speeds: Callable[[], GpuSpeeds]) -> Accelerator:
    """Return the device that is planned for: a GPU with the catalogue's figures, or a CPU with measured ones."""
    if hardware.kind == "cuda":
        return Accelerator(described(hardware), limit_bytes)
    cpu = Gpu(hardware.name, hardware.memory_bytes, "usable", "", 0, speeds=speeds())
    return Accelerator(None, limit_bytes, cpu, PROCESS_BYTES)


def speeds_of(machine: Machine, server: JobServer, folder: Path, cache: Cache) -> GpuSpeeds:
    """Return the speeds of this CPU, which are measured once and cached: cached traces are only found for equal speeds.

    Raises:
        AutotuneError: they could not be measured.
    """
    hardware = machine.hardware
    key = fingerprint("speeds", hardware.name, hardware.threads, hardware.openmp, machine.packages.get("torch"))
    document: Any = cache.get(key)
    with suppress(DecodeError):
        if document is not None:
            return decode(GpuSpeeds, document)
    measured = measure_speeds(server, SpeedsRequest(), folder / "speeds").speeds
    cache.put(key, encode(measured))
    return measured


def _without_stages(listener: Listener) -> Listener:
    """Return a listener that drops stages: tracing runs in pieces, which are displayed as one stage."""

    def hear(event: Event) -> None:
        if not isinstance(event, StageStarted):
            listener(event)

    return hear
