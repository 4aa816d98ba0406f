"""Determines the launch of a command: its number of processes, and accelerate's document."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.confidential import without_secrets
from autotune.core.configuration import Launched, ReadCommand
from autotune.core.files.nested import mapping
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import ACCELERATE, DEEPSPEED, TORCHRUN, TRL, Command, options_of
from autotune.inspection.paths import is_file
from autotune.inspection.yaml_file import read_yaml
from autotune.units import plural
from autotune.userconfig.fields import fields_of_kind
from autotune.userconfig.launchers import VISIBLE, named_gpus, number, processes_of
from autotune.userconfig.written import WrittenConfig

COUNTS = ("num_processes", "nproc_per_node", "nproc-per-node")
"""Keys for the number of processes to start."""
LAUNCH_FILES = ("accelerate_config", "config_file")
"""Keys of a TRL file that name accelerate's file."""
NO_ENGINE = "NO"
"""``distributed_type`` of accelerate for a single process."""
NO_PRECISION = "no"
"""Default of accelerate's ``mixed_precision``."""
PROCESS_OPTIONS = {
    TRL: "num_processes: {}", ACCELERATE: "--num_processes {}", TORCHRUN: "--nproc_per_node {}",
    DEEPSPEED: "--num_gpus {}",
}  # fmt: skip
"""How the number of processes is written for each launcher."""
_ON_EACH_GPU = (TRL, ACCELERATE, DEEPSPEED)
READ_BY_ACCELERATE = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
"""Beginnings of variables that accelerate reads in each process."""
# Some of them, by the attributes of a launch.
_VARIABLES: Mapping[str, str] = {"precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}
_USES_CPU = "ACCELERATE_USE_CPU"
DEEPSPEED_VARIABLES: Mapping[str, str] = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    **{
        f"ACCELERATE_DEEPSPEED_{key.removeprefix('deepspeed_').upper()}": key
        for key in (
            "deepspeed_config_file", "deepspeed_moe_layer_cls_names", "offload_optimizer_device",
            "offload_param_device", "zero3_save_16bit_model", "zero_stage",
        )
    },
}  # fmt: skip
"""Variables that accelerate reads for keys of ``deepspeed_config`` in its file (accelerate 1.15, DeepSpeedPlugin). Its
launcher sets the variable of each key in the file."""
# Texts that accelerate takes for true (accelerate 1.15, `str_to_bool`).
_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
# Beginnings of variables that accelerate's launchers set themselves: always, and by the engine (accelerate 1.15,
# `utils/launch.py`). They pass other variables of the shell on.
_SET_BY_LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_")
_SET_FOR_ENGINE: Mapping[str, tuple[str, ...]] = {NO_ENGINE: (_USES_CPU,), "FSDP": ("FSDP_",)}
# Launchers whose single process sees all GPUs, unlike torchrun's and DeepSpeed's, which have a rank and so one GPU. The
# empty name is ``python``.
_SEES_ALL_GPUS = ("", TRL, ACCELERATE)
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a process has a rank (deepspeed 0.19, ``init_distributed``)."""
# GPUs by number, alone or on a host, as in ``4,5`` and ``worker-0:4,5``.
_NUMBERED = re.compile(r"(?:^|[,:\s])(\d+)(?=[,@\s]|$)")


@dataclass(frozen=True)
class Launching(Launched):
    """The launch of a command's processes.

    Attributes:
        document: accelerate's document, with the engine to start; empty without accelerate.
        is_observed: whether these values come from a command or a running training.
        variables: variables that accelerate reads in each process, without those that its launcher sets.
        is_ranked: whether each process has a rank, as that of a launcher of several has.
        flags: options of ``accelerate launch`` that choose or configure an engine.
        is_guessed: whether the launcher starts a process on each GPU, of which the number is unknown.
    """

    document: Mapping[str, object] = field(default_factory=dict)
    is_observed: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    is_ranked: bool = False
    flags: tuple[str, ...] = ()
    is_guessed: bool = False


NOT_LAUNCHED = Launching()
"""A single process, with nothing else known of the launch."""


def launching(written: WrittenConfig, read: ReadCommand, gpus: int | None = None) -> Launching:
    """Return the launch of a command's processes.

    Args:
        read: the command as read by TRL's parser and accelerate's launcher.
        gpus: number of this machine's GPUs, if the command is for them; None otherwise.

    Raises:
        InputError: a launcher refuses its options or its file, a number of processes is invalid, or fewer GPUs are
            visible than processes are started.
        UnreadError: the number depends on the machines on which the command runs, or one process sees several GPUs.
    """
    launcher, seen = written.command.launcher, visible_gpu_count(written, gpus)
    found = processes_of(written.command, seen) or read.launched or Launched()
    document = without_secrets(read_yaml(Path(found.file)).values) if found.file else {}
    _check_launch(found)
    given = options_of(written.command.launch) if launcher == ACCELERATE else read.launch
    engines = tuple(fields_of_kind("launch", "beginnings"))
    variables = _variables(written, found, document, by_accelerate=read.launched is not None)
    found = replace(found, **_read_here(variables))
    on_cpu = "cpu" in given or found.on_cpu or any(item.values.get("use_cpu") for item in read.configurations.values())
    if not on_cpu:
        _check_gpus(written, found, gpus)
    env = {**os.environ, **written.command.env, **written.env}
    alone = found.processes == 1 and found.engine == NO_ENGINE and launcher in _SEES_ALL_GPUS
    return Launching(
        **vars(found),
        document={**document, "distributed_type": found.engine} if document or found.engine != NO_ENGINE else {},
        is_observed=launcher != TRL or read.launched is not None,
        variables=variables,
        is_ranked=not alone or env.keys() >= set(RANK_VARIABLES),
        flags=tuple(sorted(name for name in given if name.startswith(engines))) if read.launched is not None else (),
        is_guessed=seen is None and not found.sets_processes and launcher in _ON_EACH_GPU and not on_cpu,
    )


def launching_here(precision: str) -> Launching:
    """Return the launch of a training that starts in this process, which has the variables of earlier trainings.

    Args:
        precision: the precision of its configuration object, which has read the variable.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(READ_BY_ACCELERATE)}
    read, ranked = {**_read_here(variables), "precision": precision}, os.environ.keys() >= set(RANK_VARIABLES)
    # A launcher may start several of the process that builds the object.
    return Launching(**read, variables=variables, is_ranked=ranked, is_guessed=True)


def _read_here(variables: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the attributes of a launch that variables set in each process."""
    found = {name: variables[variable].lower() for name, variable in _VARIABLES.items() if variable in variables}
    return {**found, "on_cpu": variables[_USES_CPU].lower() in _TRUE} if _USES_CPU in variables else found


def _variables(
    written: WrittenConfig, found: Launched, document: Mapping[str, object], *, by_accelerate: bool
) -> Mapping[str, str]:
    """Return the variables of a command's processes that accelerate reads.

    Args:
        document: accelerate's document.
        by_accelerate: whether accelerate starts them, whose launcher sets some variables.
    """
    of_launcher = (*_SET_BY_LAUNCHERS, *_SET_FOR_ENGINE.get(found.engine, ())) if by_accelerate else ()
    if by_accelerate and found.engine == "DEEPSPEED":
        keys = mapping(document.get("deepspeed_config"))
        given = (variable for variable, key in DEEPSPEED_VARIABLES.items() if keys.get(key) is not None)
        of_launcher = (*of_launcher, "ACCELERATE_USE_DEEPSPEED", *given)
    shell = {**os.environ, **written.command.env}
    kept = {name: value for name, value in shell.items() if not name.startswith(of_launcher)}
    # TRL's parser sets the file's variables in each process, after accelerate's launcher.
    every = {**kept, **written.env}
    return {name: value for name, value in every.items() if name.startswith(READ_BY_ACCELERATE)}


def _check_launch(found: Launched) -> None:
    """Check that accelerate starts the requested number of processes.

    Raises:
        InputError: it does not, or the machines do not divide the processes.
        UnreadError: there are several machines, and no number of processes.
    """
    if found.refused:
        raise InputError(f"accelerate refuses the launch: {found.refused}")
    if found.machines > 1 and not found.sets_processes:
        raise UnreadError(
            f"num_machines is {found.machines}, and the number of processes is not set. Write num_processes."
        )
    if number(found.processes) % found.machines:
        # accelerate rounds the number on each machine down (accelerate 1.15, ``utils/launch.py``).
        raise InputError(
            f"{plural(found.processes, 'process', 'processes')} cannot be divided among"
            f" {plural(found.machines, 'machine')}.",
            hint="num_processes counts those of all machines together.",
        )


def _check_gpus(written: WrittenConfig, found: Launched, gpus: int | None) -> None:
    """Check that each process has its own GPU: NCCL fails if two share one (accelerate 1.15, ``state.py``).

    Raises:
        InputError: too few are visible.
        UnreadError: a single process sees several, so that TRL loads its model with ``device_map="auto"`` (TRL 1.16,
            ``create_model_from_path``).
    """
    launcher, each = written.command.launcher, found.processes // found.machines
    # DeepSpeed's launcher sets the variable for its processes; TRL's parser then sets the file's value in each.
    of_command = written.command.env if launcher != DEEPSPEED else {}
    by, named = VISIBLE, {**of_command, **written.env}.get(VISIBLE)
    if found.gpu_ids and VISIBLE not in written.env:
        by, named = "gpu_ids", found.gpu_ids
    count = gpus or 1 if named is None else named_gpus(named)
    if found.processes == 1 < count and found.engine == NO_ENGINE and launcher in _SEES_ALL_GPUS:
        raise UnreadError(
            f"One process sees {count} GPUs, over which TRL spreads the layers of the model, or refuses to train.",
            hint=f"Write {VISIBLE}=0 before the command, or start a process on each GPU.",
        )
    if named is None or each <= count:
        return
    option = PROCESS_OPTIONS.get(launcher, "").format(count * (found.machines if launcher in (TRL, ACCELERATE) else 1))
    raise InputError(
        f"{plural(each, 'process', 'processes')} on each machine, and {by} names {plural(count, 'GPU')}.",
        hint=f"Write {option}." if count and option else f"Name GPUs in {by}, or write use_cpu: true.",
    )


def parsing_processes(command: Command, gpus: int | None = None) -> int:
    """Return the number of processes that parse a script's options, unless accelerate starts them; 1 if invalid.

    :func:`launching` reports invalid options.

    Args:
        gpus: number of GPUs that the launcher sees on each machine; None if it is not known.
    """
    try:
        started = processes_of(command, gpus)
    except InputError:
        return 1
    return started.processes if started is not None else 1


def likely_processes(written: WrittenConfig) -> int:
    """Return the number of processes in the options and files of a command; 1 without any.

    This runs nothing of accelerate; :func:`launching` returns the number that accelerate starts.

    Raises:
        InputError: a file cannot be read, or the number is invalid.
    """
    command, seen = written.command, visible_gpu_count(written, None)
    started = processes_of(command, seen)
    if started is not None or command.launcher not in (TRL, ACCELERATE):
        return started.processes if started is not None else 1
    stated = _launch_options(written)
    return number(next((each[name] for each in stated for name in COUNTS if each.get(name)), seen or 1))


def likely_gpus(written: WrittenConfig) -> int:
    """Return the number of GPUs that a command needs on a machine, for its processes and its highest GPU number.

    Raises:
        InputError: as in :func:`likely_processes`.
    """
    numbers = map(int, _NUMBERED.findall(likely_visible(written) or ""))
    return max(likely_processes(written), *(1 + found for found in numbers), 1)


def likely_visible(written: WrittenConfig) -> str | None:
    """Return the GPUs that a command selects, as in ``CUDA_VISIBLE_DEVICES``; None if it selects none.

    Raises:
        InputError: a file cannot be read.
    """
    options, document = _launch_options(written)
    ids = next((str(each["gpu_ids"]) for each in (options, document) if each.get("gpu_ids") is not None), "all")
    if VISIBLE not in written.env and ids != "all":
        return ids
    if written.command.launcher == DEEPSPEED and "include" in options:
        return ",".join(_NUMBERED.findall(str(options["include"]).partition("@")[0]))
    return {**written.command.env, **written.env}.get(VISIBLE)


def _launch_options(written: WrittenConfig) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the options of a command's launcher, for ``trl`` also those in its file, and accelerate's document.

    Raises:
        InputError: the file cannot be read.
    """
    command, options = written.command, options_of(written.command.launch)
    if command.launcher == TRL:
        options = {**written.values, **options_of(command.words)}
    named = next((options[name] for name in LAUNCH_FILES if options.get(name)), written.default)
    return options, read_document(str(named)) if named is not None and command.launcher in (TRL, ACCELERATE) else {}


def visible_gpu_count(written: WrittenConfig, gpus: int | None) -> int | None:
    """Return the number of GPUs that the launcher of a command sees on each machine; None if unknown.

    ``trl`` sets its file's environment variables before it launches; with other launchers, only the script sets them.

    Args:
        gpus: number of this machine's GPUs, if the command is for them; None otherwise.
    """
    env = {**written.command.env, **(written.env if written.command.launcher == TRL else {})}
    return named_gpus(env[VISIBLE]) if VISIBLE in env else gpus


def default_file(command: Command) -> Path | None:
    """Return accelerate's default configuration file for a command, or None if it does not exist.

    accelerate determines its path at import (accelerate 1.15, ``commands/config/config_args.py``), before ``trl`` sets
    the variables of a file.
    """
    variables = {**os.environ, **command.env}
    caches = Path(variables.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    # Path.expanduser raises for an unknown user; accelerate uses os.path.expanduser, which returns the text unchanged.
    home = os.path.expanduser(Path(variables.get("HF_HOME", caches)))  # noqa: PTH111
    file = Path(home, "accelerate", "default_config.yaml")
    return file if is_file(file) else None


def read_document(name: str) -> Mapping[str, object]:
    """Return an accelerate document, from a file or one of TRL's by its name, such as ``zero2``.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    path = Path(name)
    if not is_file(path):
        spec = importlib.util.find_spec("trl")
        folders = spec.submodule_search_locations if spec is not None else None
        own = (Path(folder, "accelerate_configs", f"{name}.yaml") for folder in folders or ())
        path = next((file for file in own if is_file(file)), path)
    return read_yaml(path).values
