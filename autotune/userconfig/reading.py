"""Reads a command by TRL's parser in a child process, and converts its values to a training plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from autotune.core.configuration import MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.jobs.protocol import ReadCommandRequest, SmokeTestRequest
from autotune.core.machine import Hardware
from autotune.core.plan import (
    ALLOCATOR_VARIABLES,
    BEST_METRIC,
    MEASURED_VARIABLES,
    TrainingPlan,
    allocator_settings,
    unsimulated_settings,
)
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import options_of
from autotune.inspection.legacy import legacy_of
from autotune.probing.jobs import read_command as run_job
from autotune.probing.jobs import smoke_test
from autotune.probing.server import JobServer
from autotune.trainers import find_trainer
from autotune.userconfig.fields import UserPlan, smoke_test_arguments, trainer_of, user_plan
from autotune.userconfig.launch import parsing_processes, visible_gpu_count
from autotune.userconfig.problems import mentioned
from autotune.userconfig.written import WrittenConfig

NOT_OF_A_STEP = frozenset({"model_name_or_path", "model_revision", "trust_remote_code"})
"""Fields of ``trl.ModelConfig`` without effect on a step: the source of the model, and the trust in its code."""
# Time limit of the trainings of a tiny model.
_SMOKE_TEST_SECONDS = 240.0
# By default the value of `gradient_accumulation_steps` (GRPOConfig.__post_init__).
_TOGETHER = "steps_per_generation"


def read_command(
    written: WrittenConfig, hardware: Hardware | None, server: JobServer, folder: Path, gpus: int | None = None
) -> ReadCommand:
    """Return a command as read by TRL's parser and by accelerate's launcher, and the arguments that end a training.

    Args:
        hardware: the device of the training; None: any GPU.
        folder: folder of the job; it need not exist.
        gpus: number of this machine's GPUs, if the command is for them; None otherwise.
    """
    seen = visible_gpu_count(written, gpus)
    request = ReadCommandRequest(
        written.trainer,
        written.command.words,
        {name: _in_json(value) for name, value in written.values.items()},
        hardware.kind if hardware is not None else "cuda",
        hardware.compute_capability if hardware is not None else None,
        parsing_processes(written.command, seen),
        written.command.launcher,
        written.command.launch,
        seen or 1,
        str(written.default or ""),
        tuple(filter(written.may_be_own, options_of(written.command.words))),
    )
    read = run_job(server, request, folder)
    if read.refused and mentioned(written, read.refused):
        return read
    kind, wrong = find_trainer(written.trainer).config_class, {fault.key for fault in read.faults}
    old = (legacy_of(written.trainer, key, value) for key, value in written.given.items())
    wrong |= {entry.key for entry in old if entry is not None and entry.of_value and not entry.accepted}
    as_written = Configuration(kind, {name: _in_json(value) for name, value in written.given.items()}, {})
    config, metric = read.configurations.get(kind, as_written), written.given.get(BEST_METRIC)
    # The user's own scripts and reward functions may report further metrics, and the rows determine metrics with a /.
    if not written.own_command or "." in str(read.script.get("reward_funcs")) or "/" in str(metric):
        config = replace(config, values={**config.values, BEST_METRIC: "loss"})
    processes = read.launched.processes if read.launched is not None else request.processes
    given, has_rows = written.given.keys() - wrong, not written.own_command
    return replace(read, ended=ended_by(config, given, processes, server, folder / "smoke_test", has_rows=has_rows))


def ended_by(
    config: Configuration, names: Collection[str], processes: int, server: JobServer, folder: Path, *, has_rows: bool
) -> Mapping[str, str]:
    """Return the arguments, among some fields of a configuration, that end a training of a tiny model; and the errors.

    Args:
        processes: number of processes of the user's training.
        folder: folder of the job; it need not exist.
        has_rows: whether the trainer has rows to evaluate on even if the arguments do not evaluate.
    """
    arguments = smoke_test_arguments(config, names)
    request = SmokeTestRequest(trainer_of(config).name, arguments, processes, has_rows)
    return smoke_test(server, request, folder, _SMOKE_TEST_SECONDS)


def _in_json(value: object) -> object:
    """Return a YAML value as JSON types; a date becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _in_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def plan_of(written: WrittenConfig, read: ReadCommand, config: Configuration) -> UserPlan:
    """Return the training plan of a configuration.

    Raises:
        UnreadError: a trace does not support a setting.
    """
    model = read.configurations[MODEL_CONFIG]
    words = {name: value for name, value in model.values.items() if name not in NOT_OF_A_STEP}
    adapters = bool(words.get("use_peft"))
    # The choice of 4-bit weights is recognised by its quantisation type.
    kept_always = {"dtype", "use_peft", *(["bnb_4bit_quant_type"] if words.get("load_in_4bit") else [])}
    kept = {
        name: value
        for name, value in words.items()
        if value is not None
        and (value != model.defaults.get(name) or name in kept_always)
        and (adapters or not name.startswith("lora_"))
    }
    trainer = find_trainer(written.trainer)
    evaluates = trainer.evaluates and config.evaluates
    try:
        user = user_plan(config, kept, evaluates=evaluates, reads=True)
    except InputError as error:
        raise UnreadError(error.message, hint=error.hint) from error
    # TRL's parser overrides environment variables by the file's.
    env = {**written.command.env, **written.env}
    allocator = allocator_settings(env)
    kept_env = dict.fromkeys(ALLOCATOR_VARIABLES, allocator) if allocator else {}
    settings = ", ".join(unsimulated_settings(allocator))
    assumed = [f"the caching allocator has its default for {settings}, which is not simulated"] if settings else []
    measured = {name: env[name] for name in MEASURED_VARIABLES if name in env}
    assumed += [f"traces leave out the effect of {', '.join(measured)}"] if measured else []
    plan = replace(_without_derived(user.plan, written), env={**kept_env, **measured})
    return UserPlan(plan, (*user.assumptions, *assumed))


def _without_derived(plan: TrainingPlan, written: WrittenConfig) -> TrainingPlan:
    """Return a plan without the value that TRL's class derived from the accumulation, which traces change."""
    if _TOGETHER in written.given or plan.args.get(_TOGETHER) != plan.args.get("gradient_accumulation_steps"):
        return plan
    return replace(plan, args={name: value for name, value in plan.args.items() if name != _TOGETHER})
