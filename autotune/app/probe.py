"""The use case behind ``autotune probe``: search, confirm, and hand over the fastest configuration that fits."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from autotune.app.ahead import Ahead, predicting
from autotune.app.notes import notes_on
from autotune.app.offers import dropping_offer, packing_offer
from autotune.app.options import Options, check_evaluation, wished
from autotune.app.outcome import RunFacts, result_of
from autotune.app.output import Output, default_output, open_output
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.report import PAGE, write_page
from autotune.app.search import Run, run_search
from autotune.app.workload import WorkloadReader
from autotune.core.events import Listener, WorkloadReady
from autotune.core.machine import Machine
from autotune.core.result import Result
from autotune.core.workload import Init
from autotune.emit.bundle import write_bundle
from autotune.inspection.budget import memory_budget as checked_budget
from autotune.inspection.dataset import check_one_load, dataset_source, evaluation_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer
from autotune.study import SearchOutcome
from autotune.trainers.problem import TrainerProblem


@dataclass(frozen=True)
class Asked:
    """What ``autotune.probe`` was asked for, beside the options of every search."""

    model: str
    dataset: str
    memory_budget: str | int | None
    init: Init
    storage: str | None
    study: str | None
    resume: bool
    output: str | Path | None
    plan: bool
    eval_dataset: str | None = None
    eval_split: str | None = None


def probe(asked: Asked, options: Options, listener: Listener) -> Result:
    """Search, confirm, hand over, and return the document of the result; see :func:`autotune.probe`."""
    started = time.monotonic()
    check_evaluation(options.trainer, evaluates=(asked.eval_dataset or asked.eval_split) is not None)
    source, rows = model_source(asked.model, asked.init), dataset_source(asked.dataset)
    evaluation = evaluation_source(asked.dataset, asked.eval_dataset, asked.eval_split)
    if evaluation is not None:
        check_one_load(rows, evaluation)
    machine = inspect_machine(options.device)
    batch = global_batch_of(options, machine)
    out = open_output(asked.output if asked.output is not None else default_output(asked.model, asked.dataset))
    budget_bytes = _budget(asked.memory_budget, machine, out, resume=asked.resume)
    with JobServer(machine.hardware.kind, threads=machine.hardware.threads) as server:
        reader = WorkloadReader(server, out.workload, listener)
        workload = reader.read_checked(options, source, rows, machine, evaluation)
        problem = problem_of(options, workload, machine, batch)
        listener(WorkloadReady(workload, budget_bytes, problem.size, problem.baseline))
        out.remember_budget(budget_bytes)
        limit_bytes = int(budget_bytes * (1 - options.margin))
        traced = predicting(problem, limit_bytes, options, server, listener) if asked.plan else nullcontext(Ahead())
        with traced as ahead:
            run = Run(
                options=ahead.left_of(options),
                problem=problem,
                server=server,
                output=out,
                limit_bytes=limit_bytes,
                storage=asked.storage,
                study=asked.study,
                resume=asked.resume,
                predictor=ahead.predictor,
            )
            outcome = run_search(run, listener)
            compared = [record.candidate for record in (outcome.winner, outcome.baseline) if record]
            limit = options.timeout_seconds
            in_time = not outcome.interrupted and (limit is None or time.monotonic() - started < limit)
            timelines = ahead.timelines(compared, traces=in_time)
    facts = RunFacts(
        budget_bytes=budget_bytes,
        margin=options.margin,
        notes=(*notes_on(problem, options), *ahead.notes(), *_offers(problem, ahead, outcome)),
        wall_seconds=time.monotonic() - started,
        settings={
            "model": asked.model,
            "dataset": asked.dataset,
            **({"eval_dataset": asked.eval_dataset} if asked.eval_dataset is not None else {}),
            **({"eval_split": asked.eval_split} if asked.eval_split is not None else {}),
            "effort": options.effort.name,
            "init": asked.init,
            "seed": options.seed,
            "plan": asked.plan,
            **({"memory_budget": asked.memory_budget} if asked.memory_budget is not None else {}),
            **wished(options),
        },
        output_directory=str(out.directory),
        comparisons=options.effort.comparisons,
        timelines=timelines,
    )
    result = result_of(outcome, problem, facts)
    write_bundle(result, out.directory)
    write_page(result, out.directory / PAGE)
    return result


def _budget(asked: str | int | None, machine: Machine, out: Output, *, resume: bool) -> int:
    remembered = out.remembered_budget() if resume and asked is None else None
    return checked_budget(asked if remembered is None else remembered, machine.hardware)


def _offers(problem: TrainerProblem, ahead: Ahead, outcome: SearchOutcome) -> tuple[str, ...]:
    if ahead.planner is None or outcome.winner is None:
        return ()
    asked = problem, ahead.planner.estimate, outcome.winner.candidate
    return (*packing_offer(*asked), *dropping_offer(*asked))
