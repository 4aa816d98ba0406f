"""Finds out how many processes a command starts, and by which engine they share the training."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from autotune.app.check.asked import Written
from autotune.app.check.launchers import Started, counted, number
from autotune.app.check.task import UnreadError
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
        precise: whether such words say the precision, so that its document does not.
    """

    processes: int = 1
    said: bool = False
    engine: str = ""
    machines: int = 1
    document: Mapping[str, object] = field(default_factory=dict)
    folder: Path = Path()
    known: bool = False
    flags: tuple[str, ...] = ()
    precise: bool = False

    @property
    def alone(self) -> bool:
        """Whether a single process trains, without sharding."""
        return self.processes == 1 and not self.engine


ALONE = Launching()
"""A single process, of which nothing else is known."""


def launching(written: Written, read: ReadCommand, config: Configuration, gpus: int | None = None) -> Launching:
    """Return how the processes of a command are started.

    Args:
        gpus: how many this machine has, if the command is for them; None otherwise.

    Raises:
        InputError: a file that it names cannot be read, or a number of processes is none.
        UnreadError: the number depends on the machines on which the command runs.
    """
    # The last one counts: the file's, then what ``trl`` hands on of its words, then the launcher's own words.
    given = {**_own(written), **read.launch, **_pairs(written.command.launch)}
    file = next((given[name] for name in LAUNCH_FILES if given.get(name)), None)
    document, folder = _document(str(file)) if file is not None else ({}, Path())
    kind = str(document.get("distributed_type", "NO"))
    engine = _ENGINES.get(kind, "")
    if config.values.get("deepspeed") or given.get("use_deepspeed"):
        engine = "DeepSpeed"
    elif config.values.get("fsdp") or given.get("use_fsdp"):
        engine = "FSDP"
    said = counted(written.command, gpus) or _by_accelerate(given, document)
    started = said or Started(1)
    flags = tuple(
        sorted(name for name, value in given.items() if name.startswith(_FLAGS) and value not in (None, False))
    )
    return Launching(
        started.processes, said is not None, engine, started.machines, document, folder, known=True, flags=flags,
        precise=bool(given.get("mixed_precision")),
    )  # fmt: skip


def _by_accelerate(given: Mapping[str, object], document: Mapping[str, object]) -> Started | None:
    """Return what ``accelerate launch`` starts, by its words or by its document; None if neither says it.

    Raises:
        InputError: a number is none, or the processes cannot be shared out equally.
        UnreadError: there are several machines, and no number of processes.
    """
    count = next((given[name] for name in COUNTS if given.get(name) is not None), document.get("num_processes"))
    machines = number(given.get("num_machines") or document.get("num_machines") or 1, "machines")
    if count is None:
        if machines > 1:
            raise UnreadError(f"num_machines is {machines}, and nothing says how many processes. Write num_processes.")
        return None
    processes = number(count)
    if processes % machines:
        # accelerate rounds the number on each machine down (accelerate 1.15, ``utils/launch.py``).
        raise InputError(
            f"{processes} processes cannot be shared out among {machines} machines.",
            hint="num_processes counts those of all machines together.",
        )
    return Started(processes, machines)


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
    return None if count is None else number(count)


def _own(written: Written) -> Mapping[str, object]:
    """Return the keys of the file that ``trl`` hands on."""
    return {name: written.values[name] for name in (*COUNTS, *LAUNCH_FILES) if name in written.values}


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
