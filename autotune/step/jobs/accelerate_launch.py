"""Parses an ``accelerate launch`` command with accelerate's own parser and launcher, without starting a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from yaml import YAMLError

from autotune.core.configuration import NOT_COMPILED, Launched
from autotune.errors import InputError
from autotune.inspection.yaml_file import read_yaml

SCRIPT = "the script of TRL"
"""Placeholder for the script after the options of a launch."""
# Launchers of `launch_command` (accelerate 1.15, `commands/launch.py`). All but the first start the requested number of
# processes; the first starts one, unless mpirun is used.
_SIMPLE = "simple_launcher"
_LAUNCHERS: Mapping[str, str] = {
    _SIMPLE: "prepare_simple_launcher_cmd_env", "multi_gpu_launcher": "prepare_multi_gpu_env",
    "deepspeed_launcher": "prepare_deepspeed_cmd_env", "tpu_launcher": "", "tpu_pod_launcher": "",
    "sagemaker_launcher": "",
}  # fmt: skip
"""Names of launchers, each with the function of ``accelerate.utils.launch`` that checks its settings, or empty."""


class RefusedError(Exception):
    """A parser's error message, with which it would have ended the process."""


def refuse(message: str) -> NoReturn:
    """Raise a parser's message; replaces ``ArgumentParser.error``, which would end this process."""
    raise RefusedError(message)


def launch_parser() -> Any:
    """Return the parser of ``accelerate launch``; it raises :class:`RefusedError` instead of ending the process."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.error = refuse
    return parser


def read_launch(options: Sequence[str], gpus: int, default_file: str) -> Launched:
    """Return the processes and settings with which ``accelerate launch`` would start a script.

    Args:
        options: the words before the script.
        gpus: number of the machine's GPUs; at least the requested number of processes is assumed.
        default_file: the configuration file that accelerate reads by default; empty if there is none.
    """
    from accelerate.commands.launch import launch_command

    file = ""
    try:
        arguments = launch_parser().parse_args([*options, SCRIPT])
        file = arguments.config_file or ("" if arguments.cpu else default_file)
        if arguments.training_script != SCRIPT:
            refuse(f"it takes {arguments.training_script} for the script")
        # accelerate loads a file of any size and depth.
        document = read_yaml(Path(file)).values if file else {}
        if arguments.mixed_precision is None and isinstance(document.get("mixed_precision"), bool):
            refuse("mixed_precision is true or false in its file: YAML reads no without quotes as false. Write 'no'")
        has_count, precision = bool(file) or arguments.num_processes is not None, arguments.mixed_precision
        with _emulated_gpus(max(gpus, arguments.num_processes or 1), default_file) as launchers:
            launch_command(arguments)
    except (InputError, RefusedError, ValueError, TypeError, AttributeError, KeyError, OSError, YAMLError) as error:
        return Launched(file=file, refused=" ".join(str(error).split()) or type(error).__name__)
    starts_several = launchers != [_SIMPLE] or arguments.mpirun_hostfile is not None
    return Launched(
        arguments.num_processes if starts_several else 1,
        has_count,
        arguments.num_machines or 1,
        file,
        _distributed_type(arguments) if starts_several else "NO",
        0 if starts_several or arguments.num_processes == 1 else arguments.num_processes or 0,
        str(arguments.mixed_precision or "no"),
        precision is not None,
        gpu_ids="" if arguments.gpu_ids in (None, "all") else str(arguments.gpu_ids),
        # accelerate's DeepSpeed launcher passes no Dynamo backend (utils/launch.py, `prepare_deepspeed_cmd_env`).
        dynamo=NOT_COMPILED if arguments.use_deepspeed else str(arguments.dynamo_backend or NOT_COMPILED).lower(),
        on_cpu=not starts_several and bool(arguments.cpu or arguments.use_cpu),
    )


def _distributed_type(arguments: Any) -> str:
    """Return the ``distributed_type`` that accelerate's launcher chose."""
    kinds = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "tpu": "XLA"}
    return next((kind for name, kind in kinds.items() if getattr(arguments, name)), "MULTI_GPU")


@contextmanager
def _emulated_gpus(gpus: int, default_file: str) -> Iterator[list[str]]:
    """Make accelerate detect ``gpus`` GPUs, and yield a list of the launchers that it calls, which start nothing.

    A launcher checks its settings, but neither ports nor packages, which the training's machine may have.
    """
    import accelerate.commands.config.config_args as files
    import accelerate.commands.launch as module
    import accelerate.utils.launch as settings

    launchers: list[str] = []

    def note(name: str, *given: Any) -> None:
        launchers.append(name)
        arguments = given[-1]
        # For several machines, a rank and an address are checked, which may be added where training starts.
        if _LAUNCHERS[name] and arguments.num_machines == 1 and arguments.mpirun_hostfile is None:
            getattr(settings, _LAUNCHERS[name])(arguments)

    noted: Mapping[str, Any] = {name: partial(note, name) for name in _LAUNCHERS}
    with (
        mock.patch.multiple(settings, is_fp8_available=lambda: True, is_port_in_use=lambda *_: False),
        mock.patch.object(files, "default_config_file", default_file),
        mock.patch.multiple(module, default_config_file=default_file, is_bf16_available=lambda *_: True, **noted),
        mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: gpus),
    ):
        yield launchers
