"""The predictions of cases: by a trace of all layers, as planned, and as planned with measured operator times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from autotune.app.requests import traces_of
from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.planning.evaluator import Evaluator
from autotune.planning.extrapolation.forecast import TRACED_ERROR
from autotune.planning.tracing.cache import Cache, fingerprint
from autotune.planning.tracing.operators import Measure, OperatorTimes
from autotune.planning.tracing.store import Tracer
from autotune.probing.tracing import Traced, Untraceable
from benchmarks.common import whole_step
from benchmarks.gpu.accuracy import Prediction
from benchmarks.gpu.cases import Case
from benchmarks.gpu.prepared import Prepared
from benchmarks.gpu.trace_pool import NO_TIME, TracePool

Told = Callable[[Case, str, Prediction | str], None]
"""Is told of a case, a kind of prediction, and the prediction or why there is none."""


OPERATORS = fingerprint("operators")
"""The key under which a cache keeps the measured times of operators."""


def predict(pool: TracePool, prepared: Mapping[str, Prepared], cases: Sequence[Case], folder: Path, tell: Told) -> None:
    """Predict cases from peak speeds and tell of each prediction as soon as it is there.

    Args:
        prepared: scenarios by name; cases of others are passed over.
        folder: for the caches of traces.
    """
    known = {name: [case for case in cases if case.scenario == name] for name in prepared}
    asked = {case: prepared[case.scenario].trace_request(case) for case in cases if case.scenario in prepared}
    traced = {pool.trace(request): case for case, request in asked.items() if request is not None}
    with ThreadPoolExecutor(max(1, len(prepared))) as planners:
        planned = {
            name: planners.submit(_plan, pool, where, known[name], folder / name, tell)
            for name, where in prepared.items()
        }
        for future in as_completed(traced):
            case, found = traced[future], future.result()
            where = prepared[case.scenario]
            tell(case, "traced", _traced(where, case, found) if isinstance(found, TraceReply) else found.reason)
    for name, planning in planned.items():
        # The failure of one scenario must not lose the others.
        error = planning.exception()
        for case in known[name] if error is not None else ():
            tell(case, "planned", f"{type(error).__name__}: {error}")


def _traced(where: Prepared, case: Case, reply: TraceReply) -> Prediction:
    gpu = where.planned.gpu
    context_bytes = gpu.context_bytes if gpu is not None else 0
    # Where rows differ in length, the largest micro-batch takes longer than others do.
    plan = where.problem.trainer.plan(where.candidate(case), where.problem.setting)
    step = whole_step(plan, reply) if len(where.scenario.lengths) == 1 else None
    replayed = reply.replayed()
    return Prediction(
        allocated_bytes=replayed.allocated_bytes,
        reserved_bytes=replayed.reserved_bytes,
        context_bytes=context_bytes,
        host_bytes=reply.host.bytes,
        error=TRACED_ERROR,
        fits=(replayed.reserved_bytes or replayed.allocated_bytes) + context_bytes <= where.limit_bytes(case),
        step_seconds=step.seconds if step is not None else None,
        tokens_per_second=reply.tokens_per_step / step.seconds if step is not None else None,
        rows=reply.worst_rows,
        tokens=reply.worst_tokens,
        trace_seconds=reply.seconds,
    )


def _plan(pool: TracePool, where: Prepared, cases: Sequence[Case], folder: Path, tell: Told) -> None:
    # Nothing is measured yet; but the traces, which are kept, have their operators.
    times = OperatorTimes(where.planned.hardware.kind, lambda _: {}, Cache(folder / OPERATORS), OPERATORS)
    _tell_planned(pool.trace_all, where, cases, folder, times, "planned", tell)


def predict_measured(
    where: Prepared, cases: Sequence[Case], folder: Path, measure: Measure, kept: Cache, tell: Told
) -> None:
    """Predict planned cases of a scenario once more, with the times of operators on the device.

    Args:
        folder: the cache that :func:`predict` left: nothing is traced anew.
        measure: measures operators.
        kept: has the times of operators that were measured, under :data:`OPERATORS`, and gets those of others.
    """
    times = OperatorTimes(where.planned.hardware.kind, measure, kept, OPERATORS)
    _tell_planned(_not_traced, where, cases, folder, times, "measured operators", tell)


def _not_traced(requests: Sequence[TraceRequest]) -> list[Traced]:
    return [Untraceable(NO_TIME) for _ in requests]


def _tell_planned(
    tracer: Tracer, where: Prepared, cases: Sequence[Case], folder: Path, times: OperatorTimes, kind: str, tell: Told
) -> None:
    problem = where.problem
    traces = traces_of(problem.setting.workload, problem.setting.machine, tracer, Cache(folder), times=times)
    candidates: dict[Case, Candidate] = {case: where.candidate(case) for case in cases}
    evaluator = Evaluator(problem, where.planned.gpu, where.budget_bytes, traces)
    for case, estimate in zip(candidates, evaluator.run([*candidates.values()]), strict=True):
        tell(case, kind, _planned(where, case, estimate))


def _planned(where: Prepared, case: Case, estimate: Estimate) -> Prediction | str:
    memory = estimate.memory
    if memory is None:
        return estimate.reason
    return Prediction(
        allocated_bytes=memory.peak_bytes,
        reserved_bytes=memory.reserved_bytes,
        context_bytes=memory.context_bytes,
        host_bytes=memory.host_bytes,
        error=memory.error,
        fits=memory.device_bytes <= where.limit_bytes(case),
        step_seconds=memory.step_seconds,
        tokens_per_second=estimate.tokens_per_second,
    )
