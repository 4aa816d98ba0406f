"""Counts the processes that ``torchrun`` and ``deepspeed`` start, from their options."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NoReturn

from autotune.core.configuration import Launched
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import ACCELERATE, DEEPSPEED, TORCHRUN, Command

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the GPUs that a process may use."""
_GPU = re.compile(r"\+?\d|GPU-|MIG-")
# Options of ``torchrun`` (torch 2.13, ``torch/distributed/run.py``).
_OF_TORCHRUN = (("--nnodes",), ("--nproc-per-node", "--nproc_per_node"))
TORCHRUN_VARIABLES = {"PET_NNODES": "nnodes", "PET_NPROC_PER_NODE": "nproc_per_node"}
"""Variables that replace missing options of ``torchrun``, as Kubeflow sets them."""
# Options of ``deepspeed`` (DeepSpeed 0.19, ``launcher/runner.py``).
_OF_DEEPSPEED = (
    ("--num_nodes",), ("--num_gpus", "--num_accelerators"), ("--include", "-i"), ("--exclude", "-e"),
    ("--hostfile", "-H"),
)  # fmt: skip
# Words that ``torchrun`` accepts instead of a number, and the devices that it counts (``determine_local_world_size``).
_COUNTED_UNITS = {"gpu": "GPU", "auto": "device", "cpu": "core", "xpu": "XPU"}
_GPU_WORDS = frozenset({"gpu", "auto"})


def processes_of(command: Command, gpus: int | None) -> Launched | None:
    """Return the processes of a command's launcher; None if it is another launcher.

    Args:
        gpus: number of GPUs that the launcher sees on each machine; None if it is not known.

    Raises:
        InputError: a number is invalid, or the launcher refuses the options.
        UnreadError: the number depends on the machines on which the command runs.
    """
    if command.launcher == TORCHRUN:
        return _torchrun_launch(command.launch, gpus, {**os.environ, **command.env})
    if command.launcher == DEEPSPEED:
        return _deepspeed_launch(command.launch, gpus)
    if command.launcher == ACCELERATE and "-n" in command.launch:
        raise InputError("accelerate has no -n.", hint="Write --num_processes, the number over all machines.")
    return None


def named_gpus(value: str) -> int:
    """Return the number of GPUs that a value of ``CUDA_VISIBLE_DEVICES`` names.

    CUDA ignores the entries from the first invalid one on, and sees no GPU if one is named twice.
    """
    named = list(takewhile(_GPU.match, (word.strip() for word in value.split(","))))
    return len(named) if len(set(named)) == len(named) else 0


def number(value: object, of: str = "processes") -> int:
    """Return a number of processes or machines.

    Raises:
        InputError: it is not a number of at least 1.
    """
    text = str(value)
    if not text.isdecimal() or not int(text):
        raise InputError(f"{text!r} is not a number of {of}.", hint="It is at least 1.")
    return int(text)


def _torchrun_launch(launch: Sequence[str], gpus: int | None, variables: Mapping[str, str]) -> Launched:
    defaults = {name: variables[variable] for variable, name in TORCHRUN_VARIABLES.items() if variable in variables}
    options = {**defaults, **_options(TORCHRUN, launch, _OF_TORCHRUN)}
    least, _, most = options.get("nnodes", "1").partition(":")
    machines = number(least, "machines")
    if most and number(most, "machines") != machines:
        raise UnreadError(
            f"With --nnodes {least}:{most}, the number of machines is not known, nor are shards and batches. Write a"
            " single number of machines."
        )
    each = options.get("nproc_per_node", "1")
    if each in _GPU_WORDS and gpus is not None:
        return Launched(gpus * machines, True, machines)
    if each in _COUNTED_UNITS:
        raise UnreadError(
            f"--nproc_per_node {each} starts a process for each {_COUNTED_UNITS[each]} of the training's machine, whose"
            " number is not known here. Write the number."
        )
    return Launched(number(each) * machines, True, machines)


def _deepspeed_launch(launch: Sequence[str], gpus: int | None) -> Launched:
    options = _options(DEEPSPEED, launch, _OF_DEEPSPEED)
    each, machines = (_at_least_one(options.get(name)) for name in ("num_gpus", "num_nodes"))
    chosen = next((name for name in ("include", "exclude") if options.get(name)), None)
    if chosen is not None and (each or machines):
        raise InputError(
            f"DeepSpeed refuses --{chosen} together with --num_gpus or --num_nodes.", hint="Give one of them."
        )
    if chosen == "include":
        return _launch_of_slots(options["include"])
    by_hosts = chosen is not None or "hostfile" in options or (machines or 1) > 1
    if by_hosts and (each is None or ("hostfile" in options and machines is None)):
        raise UnreadError(
            "DeepSpeed starts processes on the hosts of the training, which are not known here. Write --num_nodes and"
            " --num_gpus."
        )
    # Without a number, DeepSpeed starts a process on each GPU.
    return Launched((each or gpus or 1) * (machines or 1), each is not None, machines or 1)


def _launch_of_slots(text: str) -> Launched:
    """Return the number of processes for numbered slots, as in ``worker-0:0,1@worker-1:0,1``."""
    slots: dict[str, set[str]] = {}
    for host in text.split("@"):
        name, _, numbers = host.partition(":")
        slots.setdefault(name, set()).update(filter(None, numbers.split(",")))
    counts = {len(found) for found in slots.values()}
    if len(counts) != 1 or counts == {0}:
        raise UnreadError(
            f"--include {text} does not name the same number of GPUs for each machine. Write them, as in --include"
            " worker-0:0,1@worker-1:0,1."
        )
    return Launched(counts.pop() * len(slots), True, len(slots))


def _at_least_one(text: str | None) -> int | None:
    """Return DeepSpeed's number of GPUs or machines; None for -1, the default, and 0, which mean all."""
    return None if text in (None, "-1", "0") else number(text)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog} refuses its options: {message}.")


def _options(program: str, launch: Sequence[str], known: Sequence[tuple[str, ...]]) -> Mapping[str, str]:
    """Return the known options of a launcher, including abbreviations, as its own parser reads them."""
    parser = _Parser(program, add_help=False)
    for names in known:
        parser.add_argument(*names)
    found, _ = parser.parse_known_args(list(launch))
    return {name: value for name, value in vars(found).items() if value is not None}
