"""Traces candidates for a limited time before the first probe, so that the search starts with predictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autotune.app.arguments import ProbeArguments, time_limit
from autotune.app.notes import notes_on_speed, notes_on_traces
from autotune.app.offload import notes_on_offloading, with_last_resorts_if_nothing_fits
from autotune.app.requests import traces_of
from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import memory_key
from autotune.core.documents.memory_timeline import MemoryTimeline
from autotune.core.effort import EFFORTS
from autotune.core.events import Listener, Noted, StageStarted
from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.jobs.protocol import OperatorsRequest, SpeedsRequest
from autotune.core.machine import DeviceKind, Hardware, Machine
from autotune.errors import AutotuneError
from autotune.inspection.cpu import cpu, machine_id
from autotune.inspection.gpus import present_gpu
from autotune.planning.evaluator import Evaluator
from autotune.planning.extrapolation.forecast import PROCESS_BYTES
from autotune.planning.predictor import PlannedPredictor
from autotune.planning.tracing.cache import Cache, fingerprint, package_digest, user_cache
from autotune.planning.tracing.operators import OperatorTimes
from autotune.planning.tracing.store import Tracer
from autotune.probing import JobServer, measure_operators, measure_speeds
from autotune.probing.tracing import ServerTracer
from autotune.study.improvement import search_by_traces
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_duration, plural

# Candidates that are traced between two checks of the clock.
_AT_ONCE = 4
# Most further candidates that are traced to find the one that needs the least memory.
_MAX_FURTHER = 12
# Time budget for measuring the operators of a few candidates; a process that far exceeds it hangs in an operator.
_MEASURING_SECONDS, _LONGEST_SECONDS = 10.0, 60.0
# Time after which cached speeds are measured again.
_VALID_SECONDS = 30 * 86400.0
# Largest share of a search's time limit that tracing may take.
_LARGEST_SHARE = 0.1
# Factor by which tracing is extended while no traced candidate may fit, since probes would have no start.
_UNTIL_ONE_MAY_FIT = 3.0


def predictions_of(
    args: ProbeArguments, problem: TrainerProblem, limit_bytes: int, server: JobServer, tracer: ServerTracer
) -> Predictions:
    """Trace for a limited time and return the predictions, which trace further candidates while the tracer is open.

    A tracing failure is reported and the search continues without predictions.

    Args:
        server: the probes' server; it measures the speeds of a CPU with the probes' number of threads.
    """
    args.listener(StageStarted("Tracing candidates to predict memory and speed"))
    seconds, limit_seconds = EFFORTS[args.effort].planning_seconds, time_limit(args.timeout)
    longest_seconds = None
    if limit_seconds is not None:
        seconds = min(seconds, limit_seconds * _LARGEST_SHARE)
        longest_seconds = limit_seconds * _LARGEST_SHARE * _UNTIL_ONE_MAY_FIT
    machine, cache = problem.setting.machine, user_cache()

    def measured(gpu: GpuSpeeds | None) -> GpuSpeeds:
        # A starting server uses the CPU and would disturb the measurement.
        tracer.server.wait()
        return speeds_of(machine, server, tracer.folder, cache, gpu)

    speeds = None
    if machine.hardware.kind == "cpu":
        with suppress(AutotuneError):  # reported when `device_of` fails alike
            speeds = measured(None)
    times = times_of(machine, speeds, limit_bytes, server, tracer, cache)
    with tracer.time_limit(longest_seconds):
        return trace_before_search(problem, limit_bytes, tracer, cache, measured, seconds, args.listener, times=times)


@dataclass(frozen=True)
class Predictions:
    """The predictions from traces before a search.

    Attributes:
        predictor: predictions from the traces; None if nothing was traced.
        evaluator: evaluator of the problem to search, which has last resorts if nothing fits without them.
        failure: why nothing was traced; empty otherwise.
    """

    predictor: PlannedPredictor | None = None
    evaluator: Evaluator | None = None
    failure: str = ""

    def timelines(self, candidates: Sequence[Candidate], *, traces: bool) -> Mapping[Candidate, MemoryTimeline]:
        """Return the memory through one step of the candidates that can be estimated.

        Args:
            traces: whether to trace untraced candidates; possible only while the tracing processes run.
        """
        evaluator = self.evaluator
        if evaluator is None:
            return {}
        if traces:
            with suppress(AutotuneError):
                evaluator.run(candidates)
        found = {candidate: evaluator.timeline(candidate) for candidate in candidates}
        return {candidate: timeline for candidate, timeline in found.items() if timeline is not None}

    def notes(self) -> tuple[str, ...]:
        """Return notes on the predictions for the user, one sentence each; called after the search."""
        if self.predictor is None or self.evaluator is None:
            return (f"The search ran without predictions: {self.failure}",) if self.failure else ()
        notes = [*self.predictor.notes(), *notes_on_offloading(self.evaluator.problem)]
        untraceable, device = self.evaluator.untraceable, self.evaluator.device
        if untraceable:
            reasons = dict.fromkeys(untraceable.values())
            one, several = "candidate could not be traced and was", "candidates could not be traced and were"
            why = f"{'' if len(reasons) == 1 else 'for instance, '}{next(iter(reasons))}"
            notes.append(f"{plural(len(untraceable), one, several)} not predicted: {why}")
        if device is not None:
            notes += notes_on_speed(device)
        return (*notes, *notes_on_traces(self.evaluator.traces))


def trace_before_search(
    problem: TrainerProblem,
    limit_bytes: int,
    tracer: Tracer,
    cache: Cache,
    speeds: Speeds,
    seconds: float,
    listener: Listener,
    *,
    times: OperatorTimes | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Predictions:
    """Search by traces for at most ``seconds``, and for three times as long while no traced candidate may fit.

    Tracing candidates that offload, if nothing else fits, comes on top of that.

    Args:
        speeds: measures the speeds of a CPU, which no catalogue has, or of a GPU's host.
        times: measures operators on the device; None: times are predicted from its speeds.
        clock: returns the time in seconds.
    """
    started = clock()
    setting = problem.setting
    machine = setting.machine

    def goes_on() -> bool:
        found = any(evaluator.estimate(candidate).may_fit for candidate in evaluator.candidates)
        return clock() - started < seconds * (1.0 if found else _UNTIL_ONE_MAY_FIT)

    try:
        traces = traces_of(setting.workload, machine, tracer, cache, times=times)
        evaluator = Evaluator(problem, device_of(machine.hardware, speeds), limit_bytes, traces)
        decided = search_by_traces(problem, evaluator, at_once=_AT_ONCE, goes_on=goes_on)
        evaluator = with_last_resorts_if_nothing_fits(evaluator, decided=decided)
        predictor = PlannedPredictor(evaluator, partial(_trace_least, evaluator))
    except AutotuneError as error:
        listener(Noted(f"Nothing is predicted: {error.message}"))
        return Predictions(failure=error.message)
    known = [estimate for estimate in evaluator.ranked() if estimate.memory is not None]
    listener(Noted(note_on_traced(len(known), sum(estimate.fits for estimate in known), clock() - started)))
    return Predictions(predictor, evaluator)


def note_on_traced(count: int, fitting: int, spent_seconds: float) -> str:
    """Return a sentence with the numbers of traced candidates and of those that are predicted to fit."""
    spent = format_duration(spent_seconds)
    if not count:
        return f"No trace was completed in {spent}."
    return f"Traced {plural(count, 'candidate')} in {spent}: {fitting:,} predicted to fit."


def _trace_least(evaluator: Evaluator, goes_on: Callable[[], bool]) -> None:
    """Trace a few more candidates to find the one that needs the least memory, by a search with a budget of 0 bytes.

    Args:
        goes_on: returns whether there is time for further traces.
    """
    least = min(evaluator.ranked(), key=memory_key).candidate
    without_memory = Evaluator(evaluator.problem, evaluator.device, 0, evaluator.traces)
    search_by_traces(
        evaluator.problem, without_memory, starts=[least], limit=_MAX_FURTHER, at_once=_AT_ONCE, goes_on=goes_on
    )
    if goes_on():
        evaluator.run([min(without_memory.ranked(), key=memory_key).candidate])


Speeds = Callable[[GpuSpeeds | None], GpuSpeeds]
"""Measures the speeds of a CPU (given None), or adds the host's speeds to those of a GPU."""


def device_of(hardware: Hardware, speeds: Speeds) -> Gpu:
    """Return the device to trace for: a GPU with the catalogue's figures and its host's measured speed, or a CPU with
    measured speeds."""
    if hardware.kind == "cpu":
        return Gpu(hardware.name, hardware.memory_bytes, "usable", "", PROCESS_BYTES, speeds=speeds(None))
    gpu = present_gpu(hardware)
    if gpu.speeds is not None:
        with suppress(AutotuneError):
            gpu = replace(gpu, speeds=speeds(gpu.speeds))
    return gpu


def speeds_of(
    machine: Machine, server: JobServer, folder: Path, cache: Cache, gpu: GpuSpeeds | None = None
) -> GpuSpeeds:
    """Return the speeds of this CPU, or of a GPU with its host's.

    They are cached for a month, since cached traces are valid only for equal speeds, and a measurement on a busy
    machine must not last.

    Args:
        gpu: the catalogue's speeds of the GPU.

    Raises:
        AutotuneError: they could not be measured.
    """
    # With a GPU, the measured speeds are its host's.
    key = fingerprint("speeds", cpu().name, _measured_on(machine), gpu)
    known = cache.get(_Measured, key)
    if known is not None and 0 <= time.time() - known.at_seconds < _VALID_SECONDS:
        return known.speeds
    measured = measure_speeds(server, SpeedsRequest(gpu), folder / "speeds")
    cache.put(key, _Measured(measured, time.time()))
    return measured


@dataclass(frozen=True)
class _Measured:
    """Speeds with the time of their measurement, in seconds since 1970."""

    speeds: GpuSpeeds
    at_seconds: float


def _measured_on(machine: Machine) -> tuple[object, ...]:
    """Return what measured speeds and times depend on: this very machine, and its software."""
    hardware = machine.hardware
    software = {name: machine.packages.get(name) for name in ("torch", "transformers")}
    return hardware.name, hardware.threads, hardware.variables, machine_id(), software, package_digest()


def times_of(
    machine: Machine, speeds: GpuSpeeds | None, limit_bytes: int, server: JobServer, tracer: ServerTracer, cache: Cache
) -> OperatorTimes | None:
    """Return the times of operators on this machine's CPU, measured while nothing is traced or probed; None on a GPU.

    On an H100 and an H200, times from the catalogue's speeds were closer to probes than times of operators measured in
    isolation (docs/accuracy.md). A GPU without the catalogue's speeds has no predicted times.

    Args:
        speeds: speeds of the CPU, which predict the time of an unmeasured operator; the prediction is scaled by the
            ratio of measured to predicted time of a measured operator.
    """
    hardware = machine.hardware
    if hardware.kind != "cpu":
        return None
    # A function of the module, since a search is sent to further workers.
    measure = partial(_measure, hardware.kind, limit_bytes, server, tracer)
    key = fingerprint("operators", _measured_on(machine), speeds)
    return OperatorTimes(hardware.kind, measure, cache, key)


def _measure(
    device: DeviceKind, limit_bytes: int, server: JobServer, tracer: ServerTracer, calls: Sequence[str]
) -> Mapping[str, float | None]:
    seconds = min(_MEASURING_SECONDS, tracer.left_seconds)
    if seconds <= 0:
        return {}
    request = OperatorsRequest(tuple(calls), device, seconds, limit_bytes)
    return measure_operators(server, request, tracer.new_folder(), _LONGEST_SECONDS)
