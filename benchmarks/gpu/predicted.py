"""Compares predictions with measurements: traces several cases in parallel, then probes them one by one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from autotune.app.planned import planned_machine
from autotune.core.jobs.protocol import OperatorsRequest, SpeedsRequest
from autotune.core.machine import DeviceKind, Machine
from autotune.core.measurement import Measurement, Schedule
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError
from autotune.planning.tracing.cache import Cache
from autotune.probing import JobServer, measure_operators, measure_speeds, probe
from autotune.units import format_duration
from benchmarks.gpu.accuracy import Outcome
from benchmarks.gpu.cases import Case, Scenario
from benchmarks.gpu.predictions import OPERATORS, predict, predict_measured
from benchmarks.gpu.prepared import Prepared, on_host, prepare
from benchmarks.gpu.record import Record
from benchmarks.gpu.trace_pool import NO_TIME, TracePool

_LONGEST_PROBE_SECONDS = 60.0
# Of all the time: traces come first, and operators are measured when all probes have ended.
_TRACES_SHARE, _OPERATORS_SHARE = 0.4, 0.1
# Of the operators of one scenario.
_MEASURING_SECONDS = 10.0
# A probe is not begun when it would hardly get to its first step.
_SHORTEST_PROBE_SECONDS = 8.0
SCHEDULE = Schedule(
    warmup_micro_batches=1, min_micro_batches=3, max_micro_batches=6, max_seconds=3.0, target_error=0.05
)
"""Of each probe."""


def compare(
    device: DeviceKind,
    shapes: Mapping[str, Mapping[str, Any]],
    scenarios: Sequence[Scenario],
    cases: Sequence[Case],
    file: Path,
    seconds: float,
    first: Sequence[Future[Any]] = (),
    *,
    traced: bool = True,
) -> tuple[Outcome, ...]:
    """Predict and measure cases, in their order, for so many seconds, and return what was found.

    Each measurement and each prediction is written as soon as it is there.

    Args:
        device: what is measured; planned for is the same.
        shapes: configurations of the models that scenarios name.
        file: the JSON document; a page of Markdown is written beside it.
        first: what ends before anything is measured.
        traced: whether to predict; if not, all the time is for probes, and `benchmarks.gpu.again` predicts elsewhere.

    Raises:
        InputError: there is no such device.
        ProbeServerError: processes cannot be started.
    """
    last_seconds = time.monotonic() + seconds
    end_seconds = last_seconds - (seconds * _OPERATORS_SHARE if traced else 0.0)
    planned = planned_machine(None if device == "cuda" else device)
    known = {scenario.name: scenario for scenario in scenarios}
    unknown = [
        Outcome(case.name, case.scenario, of.model, case.limit_bytes, trainer=of.trainer)
        for case, of in ((case, known[case.scenario]) for case in cases)
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-")))
        server = stack.enter_context(JobServer(device, threads=planned.hardware.threads))
        speeds = planned.gpu.speeds if planned.gpu is not None else None
        if device == "cuda" and speeds is not None:
            # Before other processes start.
            host = measure_speeds(server, SpeedsRequest(speeds), folder / "host")
            planned = on_host(planned, host.launch_seconds)
        pool = stack.enter_context(TracePool(planned.hardware.cores, time.monotonic() + seconds * _TRACES_SHARE))
        record = Record(file, planned, SCHEDULE, unknown)
        preparing = {
            scenario.name: pool.submit(partial(_prepared, scenario, shapes, planned, end_seconds))
            for scenario in scenarios
        }
        prepared, legal = _described(preparing, cases, record)
        if traced:
            predict(pool, prepared, legal, folder / "cache", record.told)
        wait(first)
        for number, case in enumerate(cases):
            found = _measured(server, preparing[case.scenario], case, folder / f"probe-{number}", end_seconds)
            record.measured(case.name, found)
            ended = found if isinstance(found, str) else f"{found.status.value}, {format_duration(found.wall_seconds)}"
            print(f"{number + 1} of {len(cases)}: {case.name}: {ended}", flush=True)
        kept = Cache(folder / "measured-operators")
        for name, where in prepared.items():
            mine = [case for case in cases if case.scenario == name and record.is_worth_timing(case.name)]
            if mine and time.monotonic() < last_seconds:
                measure = partial(_operators, server, device, where.budget_bytes, folder / f"operators-{name}")
                predict_measured(where, mine, folder / "cache" / name, measure, kept, record.told)
        record.operators(kept.get(dict[str, dict[str, float]], OPERATORS))
    return record.outcomes


def _operators(
    server: JobServer, device: DeviceKind, limit_bytes: int, folder: Path, calls: Sequence[str]
) -> Mapping[str, float | None]:
    request = OperatorsRequest(tuple(calls), device, _MEASURING_SECONDS, limit_bytes)
    return measure_operators(server, request, folder / str(len(calls)), _LONGEST_PROBE_SECONDS)


def _prepared(
    scenario: Scenario,
    shapes: Mapping[str, Mapping[str, Any]],
    planned: Machine,
    end_seconds: float,
    server: JobServer,
    folder: Path,
) -> Prepared:
    if time.monotonic() >= end_seconds:
        raise AutotuneError(NO_TIME)
    return prepare(scenario, shapes, planned, server, folder)


def _measured(
    server: JobServer, preparing: Future[Prepared], case: Case, folder: Path, end_seconds: float
) -> Measurement | str:
    """Return the measurement of a probe, or why there is none."""
    try:
        prepared = preparing.result()
    except AutotuneError as error:
        return str(error)
    illegal = prepared.problem.illegal(prepared.candidate(case))
    if illegal is not None:
        return illegal
    left_seconds = end_seconds - time.monotonic()
    if left_seconds < _SHORTEST_PROBE_SECONDS:
        return NO_TIME
    longest_seconds = min(_LONGEST_PROBE_SECONDS, left_seconds)
    found = probe(server, prepared.probe_request(case, SCHEDULE), folder, longest_seconds)
    cut_off = found.status is ProbeStatus.TIMEOUT and longest_seconds < _LONGEST_PROBE_SECONDS
    return NO_TIME if cut_off else found


def _described(
    preparing: Mapping[str, Future[Prepared]], cases: Sequence[Case], record: Record
) -> tuple[Mapping[str, Prepared], Sequence[Case]]:
    """Return the scenarios that could be prepared, and the cases that are possible in them."""
    prepared = {name: future.result() for name, future in preparing.items() if future.exception() is None}
    legal = []
    for case in cases:
        where = prepared.get(case.scenario)
        if where is not None:
            record.described(case.name, where.candidate(case), where.limit_bytes(case), flat=where.flat(case))
            if where.problem.illegal(where.candidate(case)) is None:
                legal.append(case)
    return prepared, legal
