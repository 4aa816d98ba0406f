"""The use case of ``autotune plan``: searches a space by traces, and ranks the traced candidates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.app.arguments import PlanArguments, check_range, time_limit
from autotune.app.epoch import epoch_of
from autotune.app.notes import (
    few_documents_text,
    host_notes,
    notes_on_assumptions,
    notes_on_images,
    notes_on_plans,
    notes_on_processes,
    notes_on_speed,
    notes_on_workload,
)
from autotune.app.offers import offers
from autotune.app.offload import notes_on_offloading, with_last_resorts_if_nothing_fits
from autotune.app.options import plan_options
from autotune.app.planned import check_network, planned_machine, planned_sources, planned_traces
from autotune.app.planned_bundle import bundle_folder, write_plan
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.public import signature_from
from autotune.app.servers import check_server, reserve_server_gpus, split_of
from autotune.app.tracking import Tracking
from autotune.core.documents.bundle import PlannedBundle, ServerSplit
from autotune.core.documents.estimate import Estimate, Plan, distinct, smallest_changes
from autotune.core.documents.explanation import Explanation, Subject
from autotune.core.documents.length_report import histogram
from autotune.core.events import TRACING
from autotune.core.gpu import Gpu
from autotune.core.machine import Machine
from autotune.core.rows.epoch import Epoch
from autotune.emit.figures import server_text
from autotune.errors import InputError, UnwrittenError
from autotune.inspection.gpus import compares_gpus
from autotune.inspection.machine import environment
from autotune.inspection.machine import memory_budget as checked_budget
from autotune.inspection.prices import read_prices
from autotune.planning.evaluator import Evaluator, explain
from autotune.probing.tracing import Untraceable
from autotune.study.durations import Clock
from autotune.techniques.attention import Attention
from autotune.techniques.vllm import NAME as VLLM
from autotune.trainers.length_limit import length_limit
from autotune.trainers.problem import TrainerProblem
from autotune.units import plural


@signature_from(PlanArguments)
def plan(args: PlanArguments) -> Plan:
    """Search the space by traces of TRL's own training step, with no GPU, and rank the traced candidates (about 100).

    :attr:`Plan.bundle` is the bundle that was written, or :attr:`Plan.unwritten` the reason why none was.

    Raises:
        InputError: an argument cannot be used.
        AutotuneError: processes cannot be started.
    """
    started, listener, clock = time.monotonic(), args.listener, Clock(time_limit(args.timeout))
    if compares_gpus(args.gpu):
        raise InputError("autotune.plan plans for one GPU.", hint="autotune.rent compares several.")
    check_range("A top of {} candidates", args.top)
    options = plan_options(args)
    sources = planned_sources(args)
    folder = bundle_folder(args.output, *sources[1:]) if args.output is not None else None
    planned = planned_machine(args.gpu, args.num_processes, args.num_machines, args.network)
    check_network(args.network, [planned])
    price = read_prices(args.prices).get(planned.device.name) if args.prices is not None else None
    planned, options = reserve_server_gpus(planned, options, args.server_gpus)
    hardware = planned.hardware
    budget_bytes = checked_budget(args.memory_budget, hardware)
    batch = global_batch_of(options, planned)
    tracking = Tracking(listener)
    session = planned_traces(args, options, sources, [planned], batch, tracking.pass_on)
    with session as (workload, traces, read_with_rows), tracking:
        problem = problem_of(options, workload, planned, batch)
        check_server(problem, args.server_gpus)
        evaluator = Evaluator(problem, planned.gpu, budget_bytes, traces)
        listener(TRACING)
        decided = tracking.search(evaluator, goes_on=lambda: not clock.over())
        evaluator = with_last_resorts_if_nothing_fits(evaluator, decided=decided)
        problem = evaluator.problem
        evaluator.confirm_at_full_depth(args.top)
        estimates = tuple(evaluator.ranked())
        best = list(estimates[:1])
        baseline = evaluator.estimate(problem.baseline)
        explanation = _explanation(evaluator, best) if args.explain else None
        offered = offers(evaluator, best[0], fits=best[0].fits) if best else ()
        split = _server_split(evaluator, best, args.server_gpus)
        written: PlannedBundle | str = ""
        failure: InputError | None = None
        if folder is not None:
            try:
                written = write_plan(folder, evaluator, best, split, args.settings, read_with_rows)
            except InputError as error:
                written, failure = error.message.rstrip("."), error
        timelines = [evaluator.timeline(one.candidate) for one in (*best, baseline)]
        epochs = [_epoch(problem, one, args) for one in (*best, baseline)]
    found = Plan(
        model=workload.model.name,
        dataset=workload.dataset.name,
        gpu=planned.device,
        budget_bytes=budget_bytes,
        global_batch_size=batch,
        estimates=estimates,
        baseline=baseline,
        changes=smallest_changes((baseline, *distinct(estimates, args.top)), estimates),
        left_out=problem.space.left_out,
        unlockable=problem.space.unlockable,
        notes=(
            *_notes(evaluator, planned, args, decided=decided),
            *_notes_on_host(best, planned),
            *_notes_on_server(split),
            *([f"Without a price: {planned.device.name}."] if args.prices is not None and price is None else []),
            *offered,
        ),
        trace_count=traces.count,
        new_trace_count=traces.new_count,
        wall_seconds=time.monotonic() - started,
        settings=args.settings,
        explanation=explanation,
        bundle=written if isinstance(written, PlannedBundle) else None,
        unwritten=written if isinstance(written, str) else "",
        trainer=problem.trainer.name,
        processes=hardware.processes,
        host_bytes=planned.host_bytes,
        lengths=histogram(workload.dataset.documents),
        limit=length_limit(problem.trainer, problem.setting, best[0].candidate) if best else None,
        environment=environment(planned),
        timeline=timelines[0],
        baseline_timeline=timelines[-1],
        epoch=epochs[0] if best else None,
        baseline_epoch=epochs[-1],
        price=price,
    )
    if failure is not None:
        raise UnwrittenError(failure, found)
    return found


def _epoch(problem: TrainerProblem, estimate: Estimate, args: PlanArguments) -> Epoch:
    """Return the epoch of an estimate; without a dataset, only its batches, since the number of rows is unknown."""
    epoch = epoch_of(estimate.candidate, problem, estimate.tokens_per_second)
    return epoch if args.dataset is not None else replace(epoch, steps_per_epoch=None, seconds_per_epoch=None)


def _explanation(evaluator: Evaluator, best: Sequence[Estimate]) -> Explanation:
    """Return the stages of the best estimate if that fits, and else of the baseline's."""
    if best and best[0].fits:
        return explain(evaluator, best[0].candidate, Subject.FASTEST)
    return explain(evaluator, evaluator.problem.baseline, Subject.BASELINE)


def _server_split(evaluator: Evaluator, best: Sequence[Estimate], server_gpus: int | None) -> ServerSplit | str | None:
    """Return the vLLM server for the best candidate, or why vLLM does not start; None without a server."""
    if server_gpus is None or not best:
        return None
    candidate = best[0].candidate
    found, traced = split_of(evaluator.problem, candidate, server_gpus), evaluator.traced_plan(candidate)
    if isinstance(found, str) or isinstance(traced, Untraceable):
        return found
    return replace(found, training_seconds=traced.memory.step_seconds)


def _not_measured(gpu: Gpu | None) -> str:
    if gpu is None:
        return "Nothing was measured. On a CPU these are bytes of tensors, without the libraries of a process."
    # The page may be of a similar card.
    probed = tuple(f"benchmarks/gpu/results/{alias.replace(' ', '-')}-20" for alias in gpu.aliases)
    if gpu.context_source.startswith(probed):
        return f"Nothing was measured. Other plans were compared with probes on an {gpu.name} (docs/accuracy.md)."
    return "Nothing was measured, and no prediction has been compared with this GPU yet."


def _notes(evaluator: Evaluator, planned: Machine, args: PlanArguments, *, decided: bool) -> Iterator[str]:
    problem = evaluator.problem
    workload, gpu = problem.setting.workload, planned.gpu
    lengths = workload.dataset.lengths
    yield from notes_on_workload(workload, planned.packages)
    yield from notes_on_images(problem.baseline[Attention.name], workload)
    yield from notes_on_offloading(problem)
    yield _not_measured(gpu)
    refused = problem.illegal(problem.baseline)
    if refused:
        yield f"TRL's default may not be recommended: {refused}."
    traced = len(evaluator.candidates)
    if traced < problem.size:
        which = ": those that may be the fastest, judging by the earlier traces"
        yield (
            f"Of {problem.size:,} combinations of choices, legal or not, {plural(traced, 'was', 'were')} traced"
            f"{which if decided else ' before the time limit'}. Others may be faster or need less."
        )
    few = few_documents_text(workload, problem.setting.global_batch_size)
    if few:
        yield f"{few}: an epoch is one step of {workload.dataset.documents.rows}."
    if args.dataset is None:
        yield (
            f"All rows are assumed to have {plural(lengths.longest, 'token')}. Rows of varied lengths are padded and"
            " need an attention mask, which takes more memory: give a DATASET to plan for its lengths."
        )
    assumed = {text for each in evaluator.traced_plans for text in each.memory.assumptions}
    yield from notes_on_assumptions(sorted(assumed))
    if gpu is not None:
        for text in notes_on_speed(gpu):
            yield f"{text} Name a GPU, as with --gpu H100-80GB."
    gpus = [gpu] if gpu is not None else []
    yield from notes_on_plans(workload, problem.choices.get(VLLM, ()), gpus, evaluator.traces)
    hardware = planned.hardware
    yield from notes_on_processes(hardware.processes, hardware.machines, args.network, gpus)


def _notes_on_host(best: Sequence[Estimate], planned: Machine) -> Iterator[str]:
    """Yield the host memory of the best estimate; on a CPU it is the device memory."""
    for estimate in best if planned.gpu is not None else ():
        for text in host_notes(estimate.memory, planned.hardware.launch, planned.host_bytes):
            yield f"The best candidate: {text[0].lower()}{text[1:]}"


def _notes_on_server(split: ServerSplit | str | None) -> Iterator[str]:
    if isinstance(split, str):
        yield f"With the best candidate, the vLLM server does not start: {split}."
    elif split is not None:
        gpus = plural(split.generation, "further GPU generates", "further GPUs generate")
        yield f"{gpus} in a vLLM server, which takes {server_text(split)}."
