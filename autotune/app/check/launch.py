"""Finds out how many processes a command starts, and by which engine they share the training."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from autotune.app.check.asked import Written
from autotune.core.configuration import Configuration, ReadCommand
from autotune.errors import InputError
from autotune.inspection.yaml_file import read_yaml

COUNTS = ("num_processes", "nproc_per_node", "nproc-per-node")
"""Keys that say how many processes are started."""
LAUNCH_FILES = ("accelerate_config", "config_file")
"""Keys of a file that name the one which ``accelerate launch`` reads."""
# ``distributed_type`` of an accelerate configuration by the engine that it names; others are plain data parallelism.
_ENGINES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}
# Words of ``accelerate launch`` that choose or set an engine (accelerate 1.15, ``commands/launch.py``).
_FLAGS = (
    "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "deepspeed_", "fsdp_", "megatron_lm_",
    "parallelism_config_", "zero_", "zero3_", "offload_",
)  # fmt: skip


@dataclass(frozen=True)
class Launching:
    """How the processes of a command are started.

    Attributes:
        processes: how many there are over all machines; 1 where nothing says.
        said: whether something says how many.
        engine: what shards the training, in words; empty without.
        machines: how many machines they run on.
        document: what ``accelerate launch --config_file`` reads; empty without.
        folder: from which relative paths in it lead.
        known: whether the command was read for all of this.
        flags: further words for ``accelerate launch`` by which an engine is chosen or set.
    """

    processes: int = 1
    said: bool = False
    engine: str = ""
    machines: int = 1
    document: Mapping[str, object] = field(default_factory=dict)
    folder: Path = Path()
    known: bool = False
    flags: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether a single process trains, without sharding."""
        return self.processes == 1 and not self.engine


ALONE = Launching()
"""A single process, of which nothing else is known."""


def launching(written: Written, read: ReadCommand, config: Configuration) -> Launching:
    """Return how the processes of a command are started.

    Raises:
        InputError: a file that it names cannot be read, or a number of processes is none.
    """
    given = {**_pairs(written.command.launch), **read.launch, **_own(written)}
    file = next((given[name] for name in LAUNCH_FILES if given.get(name)), None)
    document, folder = _document(str(file)) if file is not None else ({}, Path())
    count = next((given[name] for name in COUNTS if given.get(name) is not None), document.get("num_processes"))
    kind = str(document.get("distributed_type", "NO"))
    engine = _ENGINES.get(kind, "")
    if config.values.get("deepspeed") or given.get("use_deepspeed"):
        engine = "DeepSpeed"
    elif config.values.get("fsdp") or given.get("use_fsdp"):
        engine = "FSDP"
    machines = given.get("num_machines") or document.get("num_machines") or 1
    processes = _number(count) if count is not None else 1
    flags = tuple(
        sorted(name for name, value in given.items() if name.startswith(_FLAGS) and value not in (None, False))
    )
    return Launching(processes, count is not None, engine, _number(machines), document, folder, known=True, flags=flags)


def said_processes(written: Written) -> int | None:
    """Return how many processes a file starts, before TRL's parser has read it; None where it does not say.

    Raises:
        InputError: a file that it names cannot be read, or the number is none.
    """
    given = _own(written)
    count = next((given[name] for name in COUNTS if given.get(name) is not None), None)
    file = next((given[name] for name in LAUNCH_FILES if given.get(name)), None)
    if count is None and file is not None:
        count = _document(str(file))[0].get("num_processes")
    return None if count is None else _number(count)


def _own(written: Written) -> Mapping[str, object]:
    """Return the keys of the file that ``trl`` hands on."""
    return {name: written.values[name] for name in (*COUNTS, *LAUNCH_FILES) if name in written.values}


def _number(value: object) -> int:
    text = str(value)
    if not text.isdigit() or not int(text):
        raise InputError(f"{text!r} is no number of processes.", hint="It is at least 1.")
    return int(text)


def _document(name: str) -> tuple[Mapping[str, object], Path]:
    path = Path(name)
    if not path.is_file():
        spec = importlib.util.find_spec("trl")
        folders = spec.submodule_search_locations if spec is not None else None
        shipped = [Path(folder, "accelerate_configs", f"{name}.yaml") for folder in folders or ()]
        path = next((file for file in shipped if file.is_file()), path)
        if not path.is_file():
            raise InputError(
                f"The accelerate configuration {name} is neither a file nor one of TRL's.",
                hint="Look into trl/accelerate_configs, or give the path of a file.",
            )
    return read_yaml(path).values, path.parent


def _pairs(words: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for word, following in pairwise((*words, "--")):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else True if following.startswith("-") else following
    return found
