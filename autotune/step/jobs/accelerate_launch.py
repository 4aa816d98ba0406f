"""Parses an ``accelerate launch`` command with accelerate's own parser and launcher, without starting a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
_LAUNCHERS = (
    _SIMPLE, "multi_gpu_launcher", "deepspeed_launcher", "tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher",
)  # fmt: skip


class RefusedError(Exception):
    """A parser would have ended the process with this message."""


def refuse(message: str) -> NoReturn:
    """Raise a parser's message; replaces its method ``error``, which would end this process."""
    raise RefusedError(message)


def launch_parser() -> Any:
    """Return the parser of ``accelerate launch``; it raises :class:`RefusedError` instead of ending the process."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.error = refuse
    return parser


def launched(options: Sequence[str], gpus: int, default_file: str) -> Launched:
    """Return how ``accelerate launch`` starts the processes of a script.

    Args:
        options: the words before the script.
        gpus: number of the machine's GPUs; at least the requested number of processes is assumed.
        default_file: the configuration file that accelerate reads by default; empty if there is none.
    """
    from accelerate.commands.launch import launch_command

    file = ""
    try:
        asked = launch_parser().parse_args([*options, SCRIPT])
        file = asked.config_file or ("" if asked.cpu else default_file)
        if asked.training_script != SCRIPT:
            refuse(f"it takes {asked.training_script} for the script")
        if file:
            read_yaml(Path(file))  # accelerate loads a file of any size and depth
        counted, precision = bool(file) or asked.num_processes is not None, asked.mixed_precision
        with _on_machine(max(gpus, asked.num_processes or 1), default_file) as used:
            launch_command(asked)
    except (InputError, RefusedError, ValueError, TypeError, AttributeError, KeyError, OSError, YAMLError) as error:
        return Launched(file=file, refused=" ".join(str(error).split()) or type(error).__name__)
    several = used != [_SIMPLE] or asked.mpirun_hostfile is not None
    return Launched(
        asked.num_processes if several else 1,
        counted,
        asked.num_machines or 1,
        file,
        _engine(asked) if several else "NO",
        0 if several or asked.num_processes == 1 else asked.num_processes or 0,
        str(asked.mixed_precision or "no"),
        precision is not None,
        gpu_ids="" if asked.gpu_ids in (None, "all") else str(asked.gpu_ids),
        # accelerate's DeepSpeed launcher passes no Dynamo backend (utils/launch.py, `prepare_deepspeed_cmd_env`).
        dynamo=NOT_COMPILED if asked.use_deepspeed else str(asked.dynamo_backend or NOT_COMPILED).lower(),
    )


def _engine(asked: Any) -> str:
    """Return the ``distributed_type`` that accelerate's launcher chose."""
    kinds = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "tpu": "XLA"}
    return next((kind for name, kind in kinds.items() if getattr(asked, name)), "MULTI_GPU")


@contextmanager
def _on_machine(gpus: int, default_file: str) -> Iterator[list[str]]:
    """Make accelerate see GPUs, present or not, and yield the names of the launchers that it calls."""
    import accelerate.commands.config.config_args as files
    import accelerate.commands.launch as module

    used: list[str] = []
    with ExitStack() as stack:
        for name in _LAUNCHERS:
            stack.enter_context(mock.patch.object(module, name, lambda *_, name=name: used.append(name)))
        for place in (files, module):
            stack.enter_context(mock.patch.object(place, "default_config_file", default_file))
        stack.enter_context(mock.patch.object(module, "is_bf16_available", return_value=True))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=gpus))
        yield used
