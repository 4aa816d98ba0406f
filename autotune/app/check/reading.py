"""Turns the values that TRL's parser read into a training plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.app.check.task import Task, UnreadError
from autotune.app.user_plan import UserPlan, user_plan
from autotune.core.configuration import MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.plan import ALLOCATOR_VARIABLE
from autotune.core.protocol import ReadCommandRequest
from autotune.errors import InputError
from autotune.probing.jobs import read_command
from autotune.probing.tracing import ServerTracer

# Fields of trl.ModelConfig that say where the model comes from, and what a check never does.
_NOT_OF_A_STEP = frozenset({"model_name_or_path", "model_revision", "trust_remote_code"})
_OLD_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def read(task: Task, tracer: ServerTracer) -> ReadCommand:
    """Return what TRL's parser makes of the command, for the device of the check."""
    planned = task.planned
    hardware = planned.machine.hardware if planned is not None else None
    request = ReadCommandRequest(
        task.written.trainer,
        task.written.command.words,
        {name: _in_json(value) for name, value in task.written.values.items()},
        hardware.kind if hardware is not None else "cuda",
        hardware.compute_capability if hardware is not None else None,
    )
    return read_command(tracer.server, request, tracer.new_folder())


def _in_json(value: object) -> object:
    """Return a value of YAML in JSON's types: a date becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _in_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def plan_of(task: Task, read: ReadCommand, config: Configuration) -> UserPlan:
    """Return the training plan of a configuration.

    Raises:
        UnreadError: it sets something of which a trace does not know what it does.
    """
    model = read.configurations[MODEL_CONFIG]
    words = {name: value for name, value in model.values.items() if name not in _NOT_OF_A_STEP}
    adapters = bool(words.get("use_peft"))
    kept = {
        name: value
        for name, value in words.items()
        if value is not None
        and (value != model.defaults.get(name) or name in ("dtype", "use_peft"))
        and (adapters or not name.startswith("lora_"))
    }
    evaluates = task.trainer.evaluates and config.values.get("eval_strategy", "no") != "no"
    try:
        user = user_plan(config, kept, evaluates=evaluates)
    except InputError as error:
        raise UnreadError(error.message, hint=error.hint) from error
    env = {**_env(task.written.values.get("env")), **task.written.command.env}
    allocator = env.get(ALLOCATOR_VARIABLE) or env.get(_OLD_ALLOCATOR_VARIABLE)
    kept_env = {ALLOCATOR_VARIABLE: allocator} if allocator else {}
    return replace(user, plan=replace(user.plan, env=kept_env))


def _env(document: object) -> dict[str, str]:
    return {str(name): str(value) for name, value in document.items()} if isinstance(document, Mapping) else {}
