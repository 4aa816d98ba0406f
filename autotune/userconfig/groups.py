"""Reads accelerate's sizes of process groups; refuses sizes that accelerate would not start, and names the key."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autotune.core.configuration import Configuration
from autotune.emit.launch import PARALLELISM
from autotune.errors import InputError, UnreadError

FIELD = "parallelism_config"
"""The mapping in accelerate's file, and the field of the trainer's configuration."""
_REPLICAS, _SHARDS, _CONTEXT_PARALLEL = "dp_replicate_size", "dp_shard_size", "cp_size"
_PLANNED = (_REPLICAS, _SHARDS, _CONTEXT_PARALLEL)
# Sizes that are neither planned nor probed, and why.
_REFUSED: Mapping[str, str] = {
    # accelerate 1.15, ``Accelerator.prepare_model``; transformers 5.23, ``from_pretrained``.
    "tp_size": (
        "accelerate refuses a model that was loaded whole, as TRL loads it; transformers can split matrices while it "
        "loads weights (tp_size in model_init_kwargs), and a trace builds models without loading any"
    ),
    # deepspeed 0.19, ``runtime/sequence_parallel/ulysses_sp.py``.
    "sp_size": (
        "DeepSpeed gathers micro-batches from the other processes while it reads data, and splits attention by heads; "
        "neither is traced yet. context_parallel splits rows under fsdp2"
    ),
}
_SIZES = (*_PLANNED, *_REFUSED)
_CP_STRATEGY = "cp_comm_strategy"
# What else accelerate reads (accelerate 1.15, ``commands/launch.py``); no step depends on it.
_WITHOUT_EFFECT = ("cp_backend", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
_READ = frozenset({*_SIZES, _CP_STRATEGY, *_WITHOUT_EFFECT})


def groups_of(document: Mapping[str, object], config: Configuration) -> Mapping[str, object]:
    """Return the sizes that are not 1, and what else a step then depends on, by the names of ``ParallelismConfig``.

    Args:
        document: of ``accelerate launch --config_file``; empty without one.

    Raises:
        InputError: accelerate fails on what is written, or reads it nowhere.
        UnreadError: it asks for what cannot be traced.
    """
    if isinstance(config.values.get(FIELD), Mapping):
        raise InputError(
            f"{FIELD} cannot be in the trainer's own file: accelerate gets a mapping in place of an object, and fails.",
            hint=f"Write {PARALLELISM}{_SHARDS} and so on under {FIELD} in the file that accelerate_config names.",
        )
    given = document.get(FIELD) or {}
    if not isinstance(given, Mapping):
        raise InputError(f"{FIELD}: {given!r} is no mapping.", hint=f"It has {PARALLELISM}{_SHARDS} and other sizes.")
    keys = {str(name).removeprefix(PARALLELISM): value for name, value in given.items()}
    for name in given:
        if not str(name).startswith(PARALLELISM) or str(name).removeprefix(PARALLELISM) not in _READ:
            known = ", ".join(PARALLELISM + size for size in _SIZES)
            raise InputError(
                f"{name} under {FIELD} is a key that accelerate does not read.", hint=f"Sizes are {known}."
            )
    sizes = {name: keys[name] for name in _SIZES if keys.get(name) is not None}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{PARALLELISM}{name}: {value!r} is no size of a group.", hint="It is a number from 1 on.")
    sizes = {name: value for name, value in sizes.items() if value != 1}
    for name, reason in _REFUSED.items():
        if name in sizes:
            raise UnreadError(f"{PARALLELISM}{name}: {sizes[name]} is not planned: {reason}.")
    strategy = keys.get(_CP_STRATEGY) if _CONTEXT_PARALLEL in sizes else None
    return {**sizes, _CP_STRATEGY: strategy} if strategy else sizes


def started_by(
    groups: Mapping[str, object], document: Mapping[str, object], engine: str, processes: int | None
) -> Mapping[str, object]:
    """Return the groups that are made of the processes of a training.

    Args:
        groups: as :func:`groups_of` returns them.
        engine: the field of the engine that shards, ``fsdp`` or ``deepspeed``; empty without one.
        processes: number of started processes; None where it is not known.

    Raises:
        InputError: accelerate refuses them (``ParallelismConfig._validate_accelerator``).
        UnreadError: it is not known what is trained with them.
    """
    replicas, shards, shared = (int(str(groups.get(name, 1))) for name in _PLANNED)
    made, named = (
        prod((replicas, shards, shared)),
        [name for name in _PLANNED if name in groups],
    )
    product = " x ".join(f"{name}={groups[name]}" for name in named)
    if made > 1 and processes is not None and made != processes:
        started = "1 process is" if processes == 1 else f"{processes} processes are"
        raise InputError(
            f"{FIELD} is for {made} {'process' if made == 1 else 'processes'} ({product}), and {started} started, which"
            " accelerate refuses.",
            hint=f"The product of {', '.join(_PLANNED)} is num_processes; one that is absent is 1.",
        )
    if engine == "fsdp" and document.get(FIELD) and shards == shared == 1:
        raise InputError(
            f"{FIELD} leaves FSDP no processes to shard among, which accelerate refuses: {_SHARDS} is 1.",
            hint=f"Write the number of processes of a group as {PARALLELISM}{_SHARDS}, or leave {FIELD} out.",
        )
    if shared > 1 and engine != "fsdp":
        raise InputError(
            f"{PARALLELISM}{_CONTEXT_PARALLEL}: {shared} needs FSDP2, which accelerate splits rows with.",
            hint="Write distributed_type: FSDP, and fsdp_version: 2 under fsdp_config.",
        )
    if shared > 1 and replicas > 1 and shards == 1:
        raise InputError(
            f"{product} leaves each group one process for each part of a row, and none to shard among, which accelerate"
            " refuses.",
            hint=f"{PARALLELISM}{_SHARDS} has to be 2 or more.",
        )
    if shards > 1 and not engine:
        raise UnreadError(f"{PARALLELISM}{_SHARDS}: {shards} is not planned without FSDP, which alone shards by it.")
    if engine == "deepspeed" and groups:
        raise UnreadError(f"{FIELD} is not planned with DeepSpeed, which shares out among all processes.")
    # Without an engine, replicas of one process each are plain data parallelism.
    return groups if engine else {}
