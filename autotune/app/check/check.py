"""The use case of ``autotune check``: reads a configuration or command, checks its keys, and whether it fits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.app.arguments import CheckArguments, option, time_limit
from autotune.app.check.fitting import Fitting
from autotune.app.check.task import Task
from autotune.app.check.verdict_cache import CACHED_OUTCOMES, judged_for_budget, key_of
from autotune.app.planned import CPU, planned_machine
from autotune.core.configuration import MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.documents.verdict import Finding, Outcome, Severity, Verdict, has_error
from autotune.core.events import StageStarted
from autotune.core.machine import Machine
from autotune.core.plan import Launch
from autotune.errors import AutotuneError, InputError, ProbeServerError, UnreadError
from autotune.inspection.command_line import Command
from autotune.inspection.cpu import cpu as inspect_cpu
from autotune.inspection.machine import memory_budget, parse_budget
from autotune.inspection.software import check_required, installed_packages
from autotune.planning.tracing.cache import Cache, user_cache
from autotune.probing.tracing import ServerTracer
from autotune.units import plural
from autotune.userconfig.engine import as_launched, check_documents, engine_args, with_variables, without_engine
from autotune.userconfig.fields import trainer_of
from autotune.userconfig.launch import NOT_LAUNCHED, Launching, default_file, launching, likely_visible
from autotune.userconfig.launch_problems import deepspeed_findings, launch_findings, mpi_findings, precision_findings
from autotune.userconfig.objects import as_started, configuration_of, peft_words
from autotune.userconfig.problems import error_finding, problems, value_findings
from autotune.userconfig.reading import NOT_OF_A_STEP, ended_by, read_command
from autotune.userconfig.written import WrittenConfig, read_written

_FIT_OPTIONS = ("probe", "imports", "gpu", "memory_budget")
"""Arguments that only matter if memory is checked."""
# Texts that transformers' parser reads as true.
_TRUE = frozenset({"true", "yes", "t", "y", "1"})


def check(args: CheckArguments) -> Verdict:
    """Return the verdict on a configuration of any kind; see :func:`autotune.check`."""
    if not isinstance(args.config, Path | Sequence):
        return check_object(args)
    (found,) = check_each([args])
    return found


def check_each(args: Sequence[CheckArguments]) -> Iterator[Verdict]:
    """Yield the verdicts on several files or commands, which share all other options and the processes of jobs.

    Raises:
        InputError: an option cannot be used, or the only file with these options.
    """
    check_options(args[0])
    with ServerTracer(inspect_cpu().cores, args[0].listener) as tracer:
        for each in args:
            started = time.monotonic()
            try:
                verdict = check_written(each, tracer)
            except InputError as error:
                if len(args) == 1:
                    raise
                # Such as a budget that exceeds the device of one file only.
                verdict = _unusable(each, started, error)
            yield verdict


def check_written(args: CheckArguments, tracer: ServerTracer) -> Verdict:
    """Return the verdict on a file or a command.

    Args:
        tracer: runs its jobs.
    """
    started = time.monotonic()
    try:
        text = read_written(args.file, args.trainer, args.command)
    except UnreadError as error:
        text = _unread(args)
        return Task(args, text, _target_machine(args, text)[0], 0, started).unknown(error)
    except InputError as error:
        return _unusable(args, started, error)
    text = replace(text, default=default_file(text.command))
    planned, absent = _target_machine(args, text)
    budget_bytes = memory_budget(args.memory_budget, planned.hardware) if planned is not None else 0
    task, cache = Task(args, text, planned, budget_bytes, started, absent), user_cache()
    key = key_of(args, text, planned) if planned is not None else None
    known = cache.get(Verdict, key) if key is not None else None
    if known is not None and planned is not None:
        launch = known.plan.launch if known.plan is not None else Launch()
        budget = memory_budget(args.memory_budget, _device_per_process(args, text, planned, launch).hardware)
        known = judged_for_budget(known, budget, planned.host_bytes)
    if known is not None:
        seconds = time.monotonic() - started
        return replace(known, from_cache=True, settings=args.settings, passes=args.passes, wall_seconds=seconds)
    try:
        verdict = _check(task, tracer, cache)
    except (InputError, ProbeServerError):
        raise
    except AutotuneError as error:
        # A job was killed, timed out or failed, which proves nothing about the configuration.
        return task.unknown(error)
    if key is not None and verdict.cacheable and verdict.outcome in CACHED_OUTCOMES:
        cache.put(key, verdict)
    return verdict


def _unread(args: CheckArguments) -> WrittenConfig:
    return WrittenConfig(Command(args.trainer, ()), None, args.trainer or "")


def _unusable(args: CheckArguments, started: float, error: InputError) -> Verdict:
    """Return the verdict on a file or a command that cannot be used."""
    found = Finding(Severity.ERROR, str(error), file=args.file or "")
    return Task(args, _unread(args), None, 0, started).verdict(Outcome.CANNOT_RUN, (found,), reason=found.message)


def _target_machine(args: CheckArguments, text: WrittenConfig) -> tuple[Machine | None, str]:
    """Return the machine to check for, or None and the reason: of ``--gpu``, a CPU for ``use_cpu``, or this machine.

    Raises:
        InputError: ``--probe`` has no device.
    """
    on_cpu = str(text.given.get("use_cpu")).lower() in _TRUE
    word = args.gpu or (CPU if on_cpu else None)
    if not args.fits and word is None:
        return None, ""
    try:
        return planned_machine(word), ""
    except InputError as error:
        if args.probe:
            hint = "Replace --probe by --gpu to trace it for a GPU, or write use_cpu: true to train on the CPU."
            raise InputError(error.message, hint=hint) from error
        return None, str(error)


def _device_per_process(args: CheckArguments, text: WrittenConfig, planned: Machine, launch: Launch) -> Machine:
    """Return the machine with the device of each process; processes on a CPU share its memory.

    Of this machine's training GPUs, the one with the least free memory counts; ``--probe`` trains on the first GPUs.

    Raises:
        AutotuneError: the GPUs that the command names are not here.
    """
    if planned.gpu is None:
        return planned if launch.per_machine == 1 else planned_machine(CPU, launch.per_machine)
    if args.gpu is not None:
        return planned
    try:
        named = None if args.probe else likely_visible(text)
        return planned_machine(None, min(launch.per_machine, planned.hardware.processes), visible=named)
    except InputError as error:
        raise AutotuneError(error.message, hint=error.hint) from error


def _why_probe_cannot_run_here(gpus: int | None, started: Launching) -> str:
    """Return why a real run is impossible on this machine; empty if it is possible.

    Args:
        gpus: number of visible GPUs; None for a CPU, which any number of processes can share.
    """
    if gpus is None:
        return ""
    without = "leave out --probe to trace it"
    if started.machines > 1:
        return f"it trains on {started.machines} machines, and --probe runs on this one: {without}"
    if started.processes > gpus:
        visible = plural(gpus, "GPU is visible", "GPUs are visible")
        return f"{started.processes} processes need {started.processes} GPUs, and {visible}: {without}"
    return ""


def _check(task: Task, tracer: ServerTracer, cache: Cache) -> Verdict:
    named = Path(task.written.place).name if task.written.place else "the command"
    task.arguments.listener(StageStarted(f"Reading {named} with TRL's parser"))
    hardware = task.target.hardware if task.target is not None else None
    read = read_command(task.written, hardware, tracer.server, tracer.new_folder(), task.gpus)
    here = task.target is not None and task.arguments.gpu is None
    found = (*_script_findings(task), *problems(task.written, read, here=here))
    if read.refused and not has_error(found):
        return task.verdict(Outcome.UNKNOWN, found, reason=f"this machine cannot read it: {read.refused}")
    config = None if has_error(found) else read.configurations.get(task.trainer.config_class)
    try:
        started = launching(task.written, read, task.gpus)
        task = replace(task, processes=started.processes if started.is_observed else None)
        if config is None:
            return task.wrong(found)
        found += tuple(launch_findings(task.written, read, started))
        found += tuple(mpi_findings(task.written, started, config, here=here))
        started = with_variables(started, config)
        check_documents(started, config)
        _check_device(task, started, config)
        config = as_launched(config, started)
        found += (*precision_findings(task.written, read, config), *deepspeed_findings(task.written, started, config))
        if has_error(found):
            return task.wrong(found)
        engine_args(started.document, config, started.processes, variables=started.variables)
    except UnreadError as error:
        if config is None:
            return task.wrong(found)
        if task.arguments.fits:
            return task.unknown(error, found)
        return task.verdict(Outcome.READ, (*found, Finding(Severity.NOTE, error.message)))
    except InputError as error:
        return task.wrong((*found, error_finding(task.written, error)))
    if not task.arguments.fits:
        return task.verdict(Outcome.READ, found)
    reason = _own_training(task, read)
    reason = reason or (_why_probe_cannot_run_here(task.gpus, started) if task.arguments.probe else "")
    if task.target is None or reason:
        return task.verdict(Outcome.UNKNOWN, found, reason=reason or task.absent)
    launch = Launch(started.processes, started.machines)
    planned = _device_per_process(task.arguments, task.written, task.target, launch)
    budget_bytes = memory_budget(task.arguments.memory_budget, planned.hardware)
    task = replace(task, target=planned, budget_bytes=budget_bytes)
    return Fitting(task, read, config, started, found, tracer, cache).verdict()


def _check_device(task: Task, started: Launching, config: Configuration) -> None:
    """Check that accelerate and transformers train on the same device.

    Raises:
        InputError: accelerate puts the model on the CPU, and transformers the micro-batches on the GPU (transformers
            5.23, ``TrainingArguments._setup_devices``).
        UnreadError: both are on the CPU, since each process has a rank.
    """
    on_gpu = task.target is not None and task.target.gpu is not None
    if not on_gpu or not started.on_cpu or config.values.get("use_cpu"):
        return
    if started.is_ranked:
        raise UnreadError("ACCELERATE_USE_CPU trains on the CPU, and only use_cpu is read. Write use_cpu: true.")
    raise InputError(
        "accelerate's use_cpu puts the model on the CPU, and transformers the micro-batches on the GPU: the first"
        " step fails.",
        hint="Set use_cpu for TRL as well to train on the CPU, or leave it and ACCELERATE_USE_CPU out for accelerate.",
    )


def _script_findings(task: Task) -> Iterator[Finding]:
    """Yield a note if the user's script does not mention the trainer's class."""
    source, trainer_class = task.written.command.source, task.trainer.trainer_class
    if source is not None and trainer_class not in source.names:
        message = f"{source.path} does not use {trainer_class}: it may train with another class, or not at all."
        yield Finding(Severity.NOTE, message)


def _own_training(task: Task, read: ReadCommand) -> str:
    """Return why the user's own script may train another model, adapter or step than its keys; empty if not."""
    source = task.written.command.source
    if source is None:
        return ""
    if source.own_model:
        return f"{source.path} uses {source.own_model}, so its model or adapter may differ from that of its keys."
    config = read.configurations[task.trainer.config_class]
    own_step = source.own_step(evaluates=config.evaluates)
    if own_step:
        return f"{source.path} uses {own_step}, so a step may need more memory than TRL's own, which a check traces."
    unread = read.configurations[MODEL_CONFIG].values.keys() & task.written.given.keys() - NOT_OF_A_STEP
    if MODEL_CONFIG in source.names or not unread:
        return ""
    return f"{source.path} does not use {MODEL_CONFIG}, so the effect of {min(unread)} is not known."


def check_object(
    args: CheckArguments, launched: Launching = NOT_LAUNCHED, *, prepared: bool = False, evaluated: Path | None = None
) -> Verdict:
    """Return the verdict on a configuration object; see :func:`autotune.check`.

    Args:
        launched: the launch of its processes.
        prepared: whether the rows are those that TRL's trainer has tokenised.
        evaluated: file of the rows to evaluate on; None: rows like the others.
    """
    started = time.monotonic()
    check_options(args)
    found = configuration_of(args.config)
    trainer = trainer_of(found)
    if args.model is None or args.dataset is None:
        raise InputError("A configuration object names no model and no data.", hint="Give model= and dataset=.")
    text = WrittenConfig(Command(trainer.name, ()), None, trainer.name)
    if not args.fits:
        raise InputError("A configuration object has been read already.", hint="Leave out fits=False.")
    on_each = launched.processes // launched.machines if launched.is_observed else None
    planned = planned_machine(args.gpu or (CPU if found.values.get("use_cpu") else None), on_each)
    budget_bytes = memory_budget(args.memory_budget, planned.hardware)
    task = Task(args, text, planned, budget_bytes, started, processes=launched.processes)
    try:
        # A training that already runs has resolved the fields that choose an engine.
        if launched.is_observed:
            found = as_launched(without_engine(found), launched)
        else:
            found, launched = as_started(found, args.config)
            _check_device(task, launched, found)
    except UnreadError as error:
        return task.unknown(error)
    except InputError as error:
        return task.wrong((error_finding(text, error),))
    words = {**peft_words(args.peft_config), "model_name_or_path": str(args.model)}
    known = ReadCommand({found.kind: found, MODEL_CONFIG: Configuration(MODEL_CONFIG, words, {})})
    # TRL's class derives generation_batch_size from others, with which it refuses it.
    names = {name for name, value in found.values.items() if value != found.defaults[name]} - {"generation_batch_size"}
    with ServerTracer(planned.hardware.cores, args.listener) as tracer:
        ended = ended_by(found, names, launched.processes, tracer.server, tracer.new_folder(), has_rows=True)
        values = tuple(value_findings(text, found.values, ended))
        if has_error(values):
            return task.wrong(values)
        return Fitting(task, known, found, launched, values, tracer, user_cache(), prepared, evaluated).verdict()


def check_options(args: CheckArguments) -> None:
    """Check that the options of a check do not contradict each other, and the installed packages.

    Raises:
        InputError: two options contradict each other, one cannot be used, or a package is missing or unsupported.
    """
    if args.probe and args.gpu is not None:
        raise InputError(
            "--probe runs on this machine's device, --gpu names a device to trace for.", hint="Leave out one."
        )
    if args.timeout is not None and not args.probe:
        raise InputError("--timeout is the time limit of --probe.", hint="Give both, or neither.")
    for name in (name for name in _FIT_OPTIONS if name in args.settings and not args.fits):
        given = f"{option(name)} has no effect with {option('fits')}"
        raise InputError(f"{given}, which only reads the configuration.", hint="Leave out one of the two.")
    time_limit(args.timeout)
    check_required(installed_packages())
    if args.gpu is not None:
        memory_budget(args.memory_budget, planned_machine(args.gpu).hardware)
    elif args.memory_budget is not None:
        parse_budget(args.memory_budget)
