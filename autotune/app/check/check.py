"""The use case of a check: reads the command, checks its keys, and checks whether it fits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.app.arguments import CheckArguments, option, time_limit
from autotune.app.check.fitting import Fitting
from autotune.app.check.remembered import CACHED_OUTCOMES, judged_for_budget, key_of
from autotune.app.check.task import Task
from autotune.app.planned import CPU, planned_machine
from autotune.core.configuration import MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.events import StageStarted
from autotune.core.machine import Machine
from autotune.core.plan import Launch
from autotune.core.verdict import Finding, Outcome, Severity, Verdict, fatal
from autotune.errors import AutotuneError, InputError, ProbeServerError, UnreadError
from autotune.inspection.command_line import Command
from autotune.inspection.cpu import cpu as inspect_cpu
from autotune.inspection.machine import memory_budget
from autotune.planning.tracing.cache import Cache, user_cache
from autotune.probing.tracing import ServerTracer
from autotune.units import counted, parse_size
from autotune.userconfig.engine import as_launched, check_documents, engine_args, without_engine
from autotune.userconfig.fields import configuration_of, peft_words, trainer_of
from autotune.userconfig.launch import ALONE, Launching, default_file, launching, likely_visible
from autotune.userconfig.problems import of_documents, of_error, of_launch, of_precision, of_values, problems
from autotune.userconfig.reading import NOT_OF_A_STEP, read_command
from autotune.userconfig.written import Written, written

_OF_FIT = ("probe", "imports", "gpu", "memory_budget")
"""Arguments by which memory is checked."""
# Texts that transformers' parser takes for true.
_TRUE = frozenset({"true", "yes", "t", "y", "1"})


def check(asked: CheckArguments) -> Verdict:
    """Return the verdict on a configuration of any kind; see :func:`autotune.check`."""
    if not isinstance(asked.config, Path | Sequence):
        return check_object(asked)
    (found,) = check_each([asked])
    return found


def check_each(asked: Sequence[CheckArguments]) -> Iterator[Verdict]:
    """Yield the verdicts on several files or commands, which share all other options and the processes of jobs.

    Raises:
        InputError: an option cannot be used, or the only file with these options.
    """
    check_options(asked[0])
    with ServerTracer(inspect_cpu().cores, asked[0].listener) as tracer:
        for each in asked:
            started = time.monotonic()
            try:
                found = check_written(each, tracer)
            except InputError as error:
                if len(asked) == 1:
                    raise
                # Such as a budget that exceeds the device of one file only.
                found = _unusable(each, started, error)
            yield found


def check_written(asked: CheckArguments, tracer: ServerTracer) -> Verdict:
    """Return the verdict on a file or a command.

    Args:
        tracer: runs its jobs.
    """
    started = time.monotonic()
    try:
        text = written(asked.file, asked.trainer, asked.command)
    except UnreadError as error:
        text = _unread(asked)
        return Task(asked, text, _planned(asked, text)[0], 0, started).unknown(error)
    except InputError as error:
        return _unusable(asked, started, error)
    text = replace(text, default=default_file(text.command))
    planned, absent = _planned(asked, text)
    budget_bytes = memory_budget(asked.memory_budget, planned.hardware) if planned is not None else 0
    task, cache = Task(asked, text, planned, budget_bytes, started, absent), user_cache()
    key = key_of(asked, text, planned) if planned is not None else None
    known = cache.get(Verdict, key) if key is not None else None
    if known is not None and planned is not None:
        launch = known.plan.launch if known.plan is not None else Launch()
        budget = memory_budget(asked.memory_budget, _device_per_process(asked, text, planned, launch).hardware)
        known = judged_for_budget(known, budget, planned.host_bytes)
    if known is not None:
        seconds = time.monotonic() - started
        return replace(known, from_cache=True, settings=asked.settings, passes=asked.passes, wall_seconds=seconds)
    try:
        verdict = _checked(task, tracer, cache)
    except (InputError, ProbeServerError):
        raise
    except AutotuneError as error:
        # A job was killed, timed out or failed, which proves nothing about the configuration.
        return task.unknown(error)
    if key is not None and verdict.cacheable and verdict.outcome in CACHED_OUTCOMES:
        cache.put(key, verdict)
    return verdict


def _unread(asked: CheckArguments) -> Written:
    return Written(Command(asked.trainer, ()), None, asked.trainer or "")


def _unusable(asked: CheckArguments, started: float, error: InputError) -> Verdict:
    """Return the verdict on a file or a command that cannot be used."""
    found = Finding(Severity.ERROR, str(error), file=asked.file or "")
    return Task(asked, _unread(asked), None, 0, started).verdict(Outcome.CANNOT_RUN, (found,), reason=error.message)


def _planned(asked: CheckArguments, text: Written) -> tuple[Machine | None, str]:
    """Return the device to check for (``--gpu``, a CPU if the file sets it, or this machine's), or why there is none.

    Without a device, the file can still be read.

    Raises:
        InputError: ``--gpu`` names no known GPU, or ``--probe`` has no device.
    """
    on_cpu = str(text.given.get("use_cpu")).lower() in _TRUE
    word = asked.gpu or (CPU if on_cpu else None)
    if not asked.fits and word is None:
        return None, ""
    try:
        return planned_machine(word), ""
    except InputError as error:
        if word is not None:
            raise
        if asked.probe:
            hint = "Take --gpu in place of --probe to trace it for a GPU, or write use_cpu: true to train on the CPU."
            raise InputError(error.message, hint=hint) from error
        return None, str(error)


def _device_per_process(asked: CheckArguments, text: Written, planned: Machine, launch: Launch) -> Machine:
    """Return the device of each process; the processes of one machine share the memory of its CPU.

    Of this machine's training GPUs, the one with the least free memory counts; ``--probe`` trains on the first GPUs.

    Raises:
        AutotuneError: the GPUs that the command names are not here.
    """
    if planned.gpu is None:
        return planned if launch.per_machine == 1 else planned_machine(CPU, launch.per_machine)
    if asked.gpu is not None:
        return planned
    try:
        named = None if asked.probe else likely_visible(text)
        return planned_machine(None, min(launch.per_machine, planned.hardware.processes), visible=named)
    except InputError as error:
        raise AutotuneError(error.message, hint=error.hint) from error


def _why_probe_cannot_run_here(gpus: int | None, started: Launching) -> str:
    """Return why a real run needs more than this machine has; empty if it does not.

    Args:
        gpus: number of visible GPUs; None for a CPU, whose cores any number of processes can share.
    """
    if gpus is None:
        return ""
    without = "leave out --probe to trace it"
    if started.machines > 1:
        return f"it trains on {started.machines} machines, and --probe runs on this one: {without}"
    if started.processes > gpus:
        visible = counted(gpus, "GPU is visible", "GPUs are visible")
        return f"{started.processes} processes need {started.processes} GPUs, and {visible}: {without}"
    return ""


def _checked(task: Task, tracer: ServerTracer, cache: Cache) -> Verdict:
    named = Path(task.written.place).name if task.written.place else "the command"
    task.asked.listener(StageStarted(f"Reading {named} with TRL's parser"))
    hardware = task.target.hardware if task.target is not None else None
    known = read_command(task.written, hardware, tracer.server, tracer.new_folder(), task.gpus)
    here = task.target is not None and task.asked.gpu is None
    found = (*_of_source(task), *problems(task.written, known, here=here))
    if known.refused and not fatal(found):
        return task.verdict(Outcome.UNKNOWN, found, reason=f"this machine cannot read it: {known.refused}")
    config = None if fatal(found) else known.configurations.get(task.trainer.config_class)
    try:
        started = launching(task.written, known, task.gpus)
        task = replace(task, processes=started.processes if started.is_observed else None)
        if config is None:
            return task.wrong(found)
        found = (*found, *of_launch(task.written, known, started))
        check_documents(started, config)
        config = as_launched(config, started)
        found = (*found, *of_precision(task.written, known, config), *of_documents(task.written, started, config))
        if fatal(found):
            return task.wrong(found)
        engine_args(started.document, config, started.processes)
    except UnreadError as error:
        if config is None:
            return task.wrong(found)
        if task.asked.fits:
            return task.unknown(error, found)
        return task.verdict(Outcome.READ, (*found, Finding(Severity.NOTE, error.message)))
    except InputError as error:
        return task.wrong((*found, of_error(task.written, error)))
    if not task.asked.fits:
        return task.verdict(Outcome.READ, found)
    reason = _own_training(task, known)
    reason = reason or (_why_probe_cannot_run_here(task.gpus, started) if task.asked.probe else "")
    if task.target is None or reason:
        return task.verdict(Outcome.UNKNOWN, found, reason=reason or task.absent)
    launch = Launch(started.processes, started.machines)
    planned = _device_per_process(task.asked, task.written, task.target, launch)
    budget_bytes = memory_budget(task.asked.memory_budget, planned.hardware)
    task = replace(task, target=planned, budget_bytes=budget_bytes)
    return Fitting(task, known, config, started, found, tracer, cache).verdict()


def _of_source(task: Task) -> Iterator[Finding]:
    """Yield a note if the user's script does not mention the trainer's class."""
    source, trainer_class = task.written.command.source, task.trainer.trainer_class
    if source is not None and trainer_class not in source.names:
        message = f"{source.path} uses no {trainer_class}: it may train otherwise, or not at all."
        yield Finding(Severity.NOTE, message)


def _own_training(task: Task, known: ReadCommand) -> str:
    """Return why the user's own script may train another model, adapter or step than its keys name; empty if not."""
    source = task.written.command.source
    if source is None:
        return ""
    if source.own_model:
        return f"{source.path} uses {source.own_model}, so its model or adapter may be another than that of its keys."
    config = known.configurations[task.trainer.config_class]
    own_step = source.own_step(evaluates=config.evaluates)
    if own_step:
        return f"{source.path} uses {own_step}, so a step may need more than one of TRL's own, which a check traces."
    unread = known.configurations[MODEL_CONFIG].values.keys() & task.written.given.keys() - NOT_OF_A_STEP
    if MODEL_CONFIG in source.names or not unread:
        return ""
    return f"{source.path} uses no {MODEL_CONFIG}, so what it does with {min(unread)} cannot be known."


def check_object(asked: CheckArguments, launched: Launching = ALONE) -> Verdict:
    """Return the verdict on a configuration object; see :func:`autotune.check`.

    Args:
        launched: the launch of its processes.
    """
    started = time.monotonic()
    check_options(asked)
    found = configuration_of(asked.config)
    # A training that already runs has resolved the fields that choose an engine.
    found = without_engine(found) if launched.is_observed else found
    trainer = trainer_of(found)
    if asked.model is None or asked.dataset is None:
        raise InputError("A configuration object names no model and no data.", hint="Give model= and dataset=.")
    text = Written(Command(trainer.name, ()), None, trainer.name)
    if not asked.fits:
        raise InputError("A configuration object has been read already.", hint="Leave out fits=False.")
    on_each = launched.processes // launched.machines if launched.is_observed else None
    planned = planned_machine(asked.gpu or (CPU if found.values.get("use_cpu") else None), on_each)
    budget_bytes = memory_budget(asked.memory_budget, planned.hardware)
    task = Task(asked, text, planned, budget_bytes, started, processes=launched.processes)
    values = tuple(of_values(text, found.values))
    if fatal(values):
        return task.wrong(values)
    words = {**peft_words(asked.peft_config), "model_name_or_path": str(asked.model)}
    known = ReadCommand({found.kind: found, MODEL_CONFIG: Configuration(MODEL_CONFIG, words, {})})
    with ServerTracer(planned.hardware.cores, asked.listener) as tracer:
        return Fitting(task, known, found, launched, values, tracer, user_cache()).verdict()


def check_options(asked: CheckArguments) -> None:
    """Check that the options of a check are consistent.

    Raises:
        InputError: two of them contradict each other, or one cannot be used.
    """
    if asked.probe and asked.gpu is not None:
        raise InputError("--probe runs on this machine's device.", hint="Leave out --gpu.")
    if asked.timeout is not None and not asked.probe:
        raise InputError("--timeout ends the run of --probe, and there is none.", hint="Give both, or neither.")
    for name in (name for name in _OF_FIT if name in asked.settings and not asked.fits):
        given = f"{option(name)} has no effect with {option('fits')}"
        raise InputError(f"{given}, which only reads.", hint="Leave out one of the two.")
    time_limit(asked.timeout)
    if asked.gpu is not None:
        memory_budget(asked.memory_budget, planned_machine(asked.gpu).hardware)
    elif isinstance(asked.memory_budget, str):
        parse_size(asked.memory_budget)
