"""Finds out how many processes a command starts, and by which document of accelerate's."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.confidential import without_secrets
from autotune.core.configuration import ReadCommand
from autotune.emit.launch import PRECISION
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import ACCELERATE, TRL, options_of
from autotune.inspection.paths import is_file
from autotune.inspection.yaml_file import read_yaml
from autotune.userconfig.launchers import Started, counted, number
from autotune.userconfig.written import Written

COUNTS = ("num_processes", "nproc_per_node", "nproc-per-node")
"""Keys for the number of processes to start."""
LAUNCH_FILES = ("accelerate_config", "config_file")
"""Keys of a file that name the one which ``accelerate launch`` reads."""
NO_PRECISION = "no"
"""Default of accelerate's ``mixed_precision``."""
_DEFAULT_FILE = Path("accelerate", "default_config.yaml")
# With this ``distributed_type``, accelerate starts one process whatever the number is, unless one of these words sets
# another (accelerate 1.15, ``commands/launch.py``, ``_validate_launch_command`` and ``launch_command``).
_ALONE = "NO"
_DISTRIBUTED = ("multi_gpu", "tpu", "tpu_use_cluster", "use_deepspeed", "use_fsdp", "use_megatron_lm")
# Words of ``accelerate launch`` that choose or set an engine (accelerate 1.15, ``commands/launch.py``).
_FLAGS = (
    "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "deepspeed_", "fsdp_", "megatron_lm_",
    "parallelism_config_", "zero_", "zero3_", "offload_",
)  # fmt: skip


@dataclass(frozen=True)
class Launching:
    """How the processes of a command are started.

    Attributes:
        processes: number over all machines; 1 if nothing sets it.
        counted: whether something sets the number.
        machines: number of machines.
        document: the document of ``accelerate launch --config_file``; empty without one.
        folder: from which relative paths in it lead.
        known: whether the command was read for all of this.
        flags: further words for ``accelerate launch`` by which an engine is chosen or set.
        precise: whether such words set the precision, which overrides its document.
        default: accelerate's own file, where that is the document, since no other is named.
        precision: the precision that accelerate's launcher passes to its processes.
        ignored: the number of processes that is asked for, if the document sets a single one.
    """

    processes: int = 1
    counted: bool = False
    machines: int = 1
    document: Mapping[str, object] = field(default_factory=dict)
    folder: Path = Path()
    known: bool = False
    flags: tuple[str, ...] = ()
    precise: bool = False
    default: Path | None = None
    precision: str = NO_PRECISION
    ignored: object = None


ALONE = Launching()
"""A single process, of which nothing else is known."""


def launching(
    written: Written, read: ReadCommand | None = None, gpus: int | None = None, default: Path | None = None
) -> Launching:
    """Return how the processes of a command are started.

    Args:
        read: the command as read by TRL's parser; None before that: by its words and the files that they name alone.
        gpus: number of this machine's GPUs, if the command is for them; None otherwise.
        default: the file that accelerate reads if none is named; None: no file.

    Raises:
        InputError: a file that it names cannot be read, or a number of processes is none.
        UnreadError: the number depends on the machines on which the command runs.
    """
    given = _given(written, read)
    named = next((str(given[name]) for name in LAUNCH_FILES if given.get(name)), None)
    if named is not None or given.get("cpu") or written.command.launcher not in (TRL, ACCELERATE):
        default = None
    file = named or default
    document, folder = _document(str(file)) if file is not None else ({}, Path())
    if given.get("multi_gpu"):
        document = {**document, "distributed_type": "MULTI_GPU"}
    by_launcher = counted(written.command, gpus) or _by_accelerate(given, document)
    started = by_launcher or Started(1)
    flags = tuple(
        sorted(name for name, value in given.items() if name.startswith(_FLAGS) and value not in (None, False))
    )
    words = given.get(PRECISION)
    return Launching(
        started.processes, by_launcher is not None, started.machines, document, folder, known=True, flags=flags,
        default=default, precise=bool(words), precision=str(words or document.get(PRECISION) or NO_PRECISION),
        ignored=_asked(given, document) if _alone(given, document) else None,
    )  # fmt: skip


def of_ranks(written: Written, gpus: int | None = None, default: Path | None = None) -> int:
    """Return how many processes read the words of a command together, before any of them has.

    With ``trl``, a single one does, and starts the others. Undecided cases are left to :func:`launching`.
    """
    if written.command.launcher == TRL:
        return 1
    try:
        return launching(written, None, gpus, default).processes
    except InputError:
        return 1


def default_file(written: Written) -> Path | None:
    """Return the file that accelerate reads for a command that names none; None if it does not exist.

    accelerate finds its place when it is imported (accelerate 1.15, ``commands/config/config_args.py``), before ``trl``
    sets the variables of a file.
    """
    variables = {**os.environ, **written.command.env}
    caches = Path(variables.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    file = Path(variables.get("HF_HOME", caches)).expanduser() / _DEFAULT_FILE
    return file if file.is_file() else None


def _given(written: Written, read: ReadCommand | None) -> Mapping[str, object]:
    """Return the words that ``accelerate launch`` gets: of a file, and of words behind it, what ``trl`` hands on.

    No other launcher reads them, and TRL's scripts drop them (trl 1.16, ``scripts/utils.py``).
    """
    if written.command.launcher == TRL:
        own = {name: written.values[name] for name in (*COUNTS, *LAUNCH_FILES) if name in written.values}
        return {**own, **(options_of(written.command.words) if read is None else read.launch)}
    return options_of(written.command.launch) if written.command.launcher == ACCELERATE else {}


def _alone(given: Mapping[str, object], document: Mapping[str, object]) -> bool:
    return document.get("distributed_type") == _ALONE and not any(given.get(name) for name in _DISTRIBUTED)


def _asked(given: Mapping[str, object], document: Mapping[str, object]) -> object:
    """Return the number of processes that is asked for; None if nothing sets it."""
    return next((given[name] for name in COUNTS if given.get(name) is not None), document.get("num_processes"))


def _by_accelerate(given: Mapping[str, object], document: Mapping[str, object]) -> Started | None:
    """Return the processes of ``accelerate launch``, by its words or by its document; None if neither sets them.

    Raises:
        InputError: a number is none, or the processes cannot be shared out equally.
        UnreadError: there are several machines, and no number of processes.
    """
    if _alone(given, document):
        return Started(1)
    count = _asked(given, document)
    machines = number(given.get("num_machines") or document.get("num_machines") or 1, "machines")
    if count is None:
        if machines > 1:
            raise UnreadError(
                f"num_machines is {machines}, and the number of processes is not set. Write num_processes."
            )
        return None
    processes = number(count)
    if processes % machines:
        # accelerate rounds the number on each machine down (accelerate 1.15, ``utils/launch.py``).
        raise InputError(
            f"{processes} processes cannot be shared out among {machines} machines.",
            hint="num_processes counts those of all machines together.",
        )
    return Started(processes, machines)


def _document(name: str) -> tuple[Mapping[str, object], Path]:
    path = Path(name)
    if not is_file(path):
        spec = importlib.util.find_spec("trl")
        folders = spec.submodule_search_locations if spec is not None else None
        shipped = [Path(folder, "accelerate_configs", f"{name}.yaml") for folder in folders or ()]
        path = next((file for file in shipped if is_file(file)), path)
        if not is_file(path):
            raise InputError(
                f"The accelerate configuration {name} is neither a file nor one of TRL's.",
                hint="Look into trl/accelerate_configs, or give the path of a file.",
            )
    return without_secrets(read_yaml(path).values), path.parent
