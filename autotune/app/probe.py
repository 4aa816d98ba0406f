"""The use case of ``autotune probe``: searches, confirms, and writes the fastest configuration that fits."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from autotune.app.arguments import ProbeArguments, time_limit
from autotune.app.base import start_of
from autotune.app.notes import notes_on, notes_on_device, notes_on_workers
from autotune.app.offers import offers
from autotune.app.offload import as_searched, notes_on_untried
from autotune.app.options import Options, check_evaluation, probe_options
from autotune.app.outcome import RunFacts, result_of
from autotune.app.output import Output, default_output, open_output
from autotune.app.predictions import Predictions, predictions_of
from autotune.app.problem import attentions, global_batch_of, problem_of
from autotune.app.report import write_result
from autotune.app.search import Run, check_study, storage_of, worker_servers
from autotune.app.workers.parallel import search_in_parallel
from autotune.app.workload import WorkloadReader
from autotune.core.documents.result import BaseFile, Result
from autotune.core.events import Noted, StageStarted, WorkloadReady, ignore
from autotune.core.machine import Machine
from autotune.core.workload import Init, Workload
from autotune.emit.rows import training_rows
from autotune.errors import AutotuneError, InputError, JobLostError
from autotune.inspection.dataset import check_one_load, dataset_source, evaluation_source
from autotune.inspection.machine import divide_among_workers
from autotune.inspection.machine import memory_budget as checked_budget
from autotune.inspection.model import model_source
from autotune.planning.tracing.cache import user_cache
from autotune.probing import JobServer
from autotune.study.durations import Clock
from autotune.study.problem import SearchOutcome
from autotune.userconfig.base import UserBase, read_base, rewards_of, sources_of
from autotune.userconfig.edit import EditTarget, edited_base
from autotune.userconfig.launch import likely_processes
from autotune.userconfig.sources import Sources, teacher_of
from autotune.userconfig.written import WrittenConfig, read_written


def probe(args: ProbeArguments) -> Result:
    """Search, confirm, write the bundle, and return the result document; see :func:`autotune.probe`."""
    started, listener, clock = time.monotonic(), args.listener, Clock(time_limit(args.timeout))
    config = read_written(str(args.base), args.trainer) if args.base is not None else None
    options = probe_options(args if config is None else replace(args, trainer=config.trainer))
    given = _sources_of_arguments(args) if config is None else None
    processes = args.num_processes
    if config is not None and processes is None:
        processes = likely_processes(config)
    machine, (own, *further) = divide_among_workers(args.device, processes, args.workers)
    for note in notes_on_device(machine):
        listener(Noted(note))
    batch = global_batch_of(options, machine)
    name, hardware = default_output(str(args.model), str(args.dataset), args.base), machine.hardware
    remembers = args.resume and args.memory_budget is None
    # Checked before the output directory is created; it may hold the budget of the run to resume.
    budget_bytes = 0 if remembers else checked_budget(args.memory_budget, hardware)
    out = open_output(name if args.output is None else args.output)
    if remembers:
        budget_bytes = checked_budget(out.remembered_budget(), hardware)
    running = worker_servers(hardware, own, listener, early=args.plan)
    with out.locked(), running as (server, tracer), tracer.time_limit(clock.limit_seconds):
        check_study(args, out)
        # A resumed study keeps its budget; a different one is refused later.
        if not args.resume or out.remembered_budget() is None:
            out.remember_budget(budget_bytes)
        try:
            with server.time_limit(clock.left()):
                options, base, workload = _read(args, options, config, given, machine, server, out)
        except JobLostError as error:
            if not clock.over():
                raise
            late = f"Nothing was measured in --timeout {args.timeout}."
            raise JobLostError(f"{late} {error.message}", hint="Give more time, or fewer rows.") from error
        start = start_of(base, options, workload, machine) if base is not None else None
        problem = problem_of(options, workload, machine, start.batch if start is not None else batch, start)
        listener(WorkloadReady(workload, hardware, budget_bytes, problem.size, problem.baseline, own=base is not None))
        limit_bytes = int(budget_bytes * (1 - args.margin))
        # The run is sent to further workers, and the listener belongs to this process.
        run = Run(replace(args, listener=ignore), problem, server, out, limit_bytes)
        check_study(args, out, storage_of(run).fingerprint)
        with server.time_limit(clock.left()):
            predictions = predictions_of(args, problem, limit_bytes, server, tracer) if args.plan else Predictions()
        problem = predictions.evaluator.problem if predictions.evaluator is not None else problem
        run = replace(run, problem=problem, timeout_seconds=clock.left(), predictor=predictions.predictor)
        outcome = search_in_parallel(run, further, listener)
        problem = as_searched(problem, outcome)
        compared = [record.candidate for record in (outcome.winner, outcome.baseline) if record]
        in_time = not outcome.interrupted and not clock.over()
        timelines = predictions.timelines(compared, traces=in_time)
        file, file_notes = _edited_file(replace(run, problem=problem), base, outcome)
        facts = RunFacts(
            budget_bytes=budget_bytes,
            margin=args.margin,
            notes=(
                *file_notes,
                *notes_on(problem),
                *notes_on_workers(hardware, len(further)),
                *predictions.notes(),
                *(_offers(predictions, outcome) if in_time else ()),
                *notes_on_untried(problem, outcome),
            ),
            wall_seconds=time.monotonic() - started,
            settings=args.settings,
            output_directory=str(out.directory),
            base=file,
            timelines=timelines,
        )
        # No other run may write to the folder before.
        return write_result(result_of(outcome, problem, facts), out.directory)


def _read(
    args: ProbeArguments,
    options: Options,
    config: WrittenConfig | None,
    given: Sources | None,
    machine: Machine,
    server: JobServer,
    out: Output,
) -> tuple[Options, UserBase | None, Workload]:
    """Return the options with those of the base, the base, and the workload with the self-test of attention.

    Args:
        config: the base as written; None without one.
        given: the model and the rows of the arguments; None: those of the base.

    Raises:
        InputError: the base, the model or the rows cannot be used.
        JobLostError: a time limit was exceeded.
    """
    base, listener = None, args.listener
    if config is not None:
        listener(StageStarted(f"Reading {config.place} with TRL's parser"))
        base = read_base(config, machine.hardware, server, out.workload / "base")
        options = _options_with_base(options, base, args.init)
    named = given or _sources_with_base(args, options, base)
    reader = WorkloadReader(server, out.workload, listener)
    attention = str(base.plan.model.get("attn_implementation") or "") if base is not None else ""
    read = named.model, named.dataset, named.evaluation
    workload = reader.read(options.trainer.name, *read, options.rollouts, options.peft, options.teacher)
    wanted = attentions(options, machine, attention or None)
    return options, base, reader.check_attention(workload, machine, wanted, user_cache())


def _sources_of_arguments(args: ProbeArguments) -> Sources:
    """Return the model and the rows of the arguments.

    Raises:
        InputError: one of them is missing or cannot be used.
    """
    if args.model is None or args.dataset is None:
        missing = " and no ".join(name.upper() for name in ("model", "dataset") if getattr(args, name) is None)
        raise InputError(f"There is no {missing}.", hint="Give both, or a configuration that names them with --base.")
    rows = dataset_source(args.dataset, args.split, args.dataset_config)
    evaluation = evaluation_source(args.dataset, args.eval_dataset, args.eval_split, args.split, args.dataset_config)
    if evaluation is not None:
        check_one_load(rows, evaluation)
    return Sources(model_source(args.model, args.init), rows, evaluation)


def _sources_with_base(args: ProbeArguments, options: Options, base: UserBase | None) -> Sources:
    """Return the model and the rows of the arguments, or else of the base.

    Raises:
        InputError: one of them is missing or cannot be used.
    """
    assert base is not None
    found = sources_of(base, args.model, args.dataset)
    rows, evaluation = found.dataset, found.evaluation
    for option, value in (("--split", args.split), ("--dataset-config", args.dataset_config)):
        if value is not None and args.dataset is None:
            raise InputError(
                f"{option} needs a DATASET: the rows are those of {base.name}.",
                hint="Give a DATASET too, or write it in the file.",
            )
    if args.dataset is not None:
        given = dataset_source(args.dataset, args.split, args.dataset_config)
        rows = replace(given, reading=rows.reading, test_size=rows.test_size)
        evaluation = evaluation and replace(evaluation, config=rows.config)
    if args.evaluates:
        rows = replace(rows, test_size=None)
        evaluation = evaluation_source(rows.name, args.eval_dataset, args.eval_split, rows.split, rows.config)
        assert evaluation is not None
        evaluation = replace(evaluation, reading=rows.reading)
    elif evaluation is not None and rows.test_size is not None:
        evaluation = replace(rows, name=evaluation.name)
    elif evaluation is not None and rows.data_files is not None:
        raise InputError(
            f"{base.name} evaluates (eval_strategy), and {rows.name} is a file, which has no split for it.",
            hint="Name rows to evaluate on with --eval-dataset.",
        )
    if evaluation is not None and rows.test_size is None and (args.evaluates or args.split is not None):
        check_one_load(rows, evaluation)
    check_evaluation(options.trainer, evaluates=evaluation is not None)
    return Sources(replace(found.model, init=args.init), rows, evaluation)


def _options_with_base(options: Options, base: UserBase, init: Init) -> Options:
    """Return options with the base's reward functions and teacher if the arguments have none."""
    rewards, teacher = options.rollouts.rewards or rewards_of(base), options.teacher
    if teacher is None and options.trainer.has_teacher:
        teacher = teacher_of(base.config, init)
    return replace(options, rollouts=replace(options.rollouts, rewards=rewards), teacher=teacher)


def _edited_file(run: Run, base: UserBase | None, outcome: SearchOutcome) -> tuple[BaseFile | None, tuple[str, ...]]:
    """Return the base's file with the recommendation's changes, and notes on it."""
    if base is None:
        return None, ()
    args, out, trainer, setting = run.arguments, run.output, run.problem.trainer, run.problem.setting
    notes = tuple(f"{base.name}: {assumption}." for assumption in base.assumptions)
    if outcome.winner is None:
        return BaseFile(base.name), notes
    plan = trainer.plan(outcome.winner.candidate, setting)
    workload = setting.workload
    rows = training_rows(workload, plan, out.directory)
    copied = rows.cut or any(profile.dropped for profile in workload.profiles)
    wanted = EditTarget(
        plan,
        frozenset(setting.fixed),
        workload.model_source.name if args.model is not None else None,
        workload.teacher_source.name if args.teacher is not None and workload.teacher_source is not None else None,
        rows if copied or args.dataset is not None or args.evaluates else None,
        args.evaluates,
        out.directory,
    )
    try:
        file, note = edited_base(base, wanted, trainer, setting, run.server, out.workload / "handed-over")
    except InputError as error:
        # The measurements are kept.
        refused = f"{base.name} cannot take the recommendation: {error.message}"
        without = f"The bundle has the recommendation alone, without the other keys of {base.name}."
        return BaseFile(base.name), (*notes, f"{refused} {without}")
    return file, (*notes, *(each for each in (note, file.withheld_text) if each))


def _offers(predictions: Predictions, outcome: SearchOutcome) -> tuple[str, ...]:
    evaluator = predictions.evaluator
    if evaluator is None or outcome.winner is None:
        return ()
    with suppress(AutotuneError):
        (found,) = evaluator.run([outcome.winner.candidate])
        return offers(evaluator, found, fits=True) if found.memory is not None else ()
    return ()
