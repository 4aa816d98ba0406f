"""Reads the sharding of a training (FSDP2, ZeRO, process groups) from accelerate's and DeepSpeed's documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.core.configuration import NOT_COMPILED, Configuration
from autotune.core.files.nested import mapping
from autotune.emit.launch import PARALLELISM, PRECISION
from autotune.errors import InputError, UnreadError
from autotune.techniques.offload import offload_variables
from autotune.techniques.reference import SYNCHRONISED_WHOLE
from autotune.techniques.sharding import ENGINE_FIELDS, ZERO_STAGES
from autotune.userconfig.deepspeed import NAMED, check_devices, deepspeed_document, with_auto
from autotune.userconfig.fields import fields_of_kind, tables
from autotune.userconfig.fsdp import NO_VARIABLES, SAVED, SHARDED, fsdp_args, fsdp_keys, launched_fsdp
from autotune.userconfig.launch import DEEPSPEED_VARIABLES, NO_PRECISION, Launching

# accelerate still keeps its trained weights in float32, and may offload them; without a launcher it ignores FSDP
# (accelerate 1.15, `fsdp2_prepare_model`, `AcceleratorState`).
_UNTRACED_FSDP = "FSDP of a single process is not traced. Write num_processes, or leave FSDP out."
_PRECISIONS = ("bf16", "fp16")
_KINDS = frozenset({"NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP"})
FIELD = "parallelism_config"
"""The mapping in accelerate's file, and the field of the trainer's configuration."""
_REPLICAS, _SHARDS, _CONTEXT_PARALLEL = "dp_replicate_size", "dp_shard_size", "cp_size"
_PLANNED = (_REPLICAS, _SHARDS, _CONTEXT_PARALLEL)
_CP_STRATEGY = "cp_comm_strategy"
# Variables by which accelerate chooses an engine or groups of processes (accelerate 1.15, `Accelerator.__init__`).
_CHOICES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
_USES_FSDP = "ACCELERATE_USE_FSDP"


def without_engine(config: Configuration) -> Configuration:
    """Return a configuration without its sharding."""
    unset = {name: config.defaults.get(name) for name in ENGINE_FIELDS if name in config.values}
    return replace(config, values={**config.values, **unset})


def as_launched(config: Configuration, started: Launching) -> Configuration:
    """Return a configuration with the precision of accelerate's launcher, if that applies.

    transformers uses the launcher's precision unless ``bf16`` or ``fp16`` is true (transformers 5.23,
    ``training_args.py``). A DeepSpeed document of the trainer may have its own precision (accelerate 1.15,
    ``DeepSpeedPlugin.set_mixed_precision``). Without ``torch_compile``, accelerate compiles with the launcher's
    ``dynamo_backend`` (``TorchDynamoPlugin``).

    Raises:
        InputError: accelerate passes the precision to DeepSpeed's document, which then contradicts the trainer's
            arguments: transformers raises an error.
        UnreadError: the precision cannot be traced, or only accelerate's launcher compiles the model.
    """
    values, wanted = config.values, started.precision
    if started.dynamo != NOT_COMPILED and not values.get("torch_compile"):
        raise UnreadError(
            f"accelerate's dynamo_backend: {started.dynamo} compiles the model, and only torch_compile is read."
            " Write torch_compile: true instead."
        )
    if wanted == NO_PRECISION or values.get("bf16") or values.get("fp16"):
        return config
    own = deepspeed_document({}, config)
    if own is not None and wanted in own:
        return config
    if wanted not in _PRECISIONS:
        raise UnreadError(f"mixed_precision: {wanted} is not traced. Write {' or '.join(_PRECISIONS)}.")
    if own is None and started.document.get("distributed_type") == "DEEPSPEED":
        raise InputError(
            f"bf16 and fp16 are false, and accelerate's mixed_precision: {wanted} sets DeepSpeed's: transformers"
            " refuses the contradiction.",
            hint=f"Write {wanted}: true, or mixed_precision: 'no' for accelerate.",
        )
    return replace(config, values={**values, wanted: True})


def with_variables(started: Launching, config: Configuration) -> Launching:
    """Return a launch in which FSDP that only a variable chooses is in accelerate's document.

    A training leaves the variable in its process (accelerate 1.15, ``Accelerator.__init__``). It has no effect on a
    CPU, on a single process without a rank, and beside DeepSpeed (``AcceleratorState.__init__``).

    Raises:
        UnreadError: it chooses FSDP in its first version.
    """
    document, values = started.document, config.values
    chosen = values.get("fsdp") or document.get("distributed_type") == "FSDP"
    if chosen or not _is_true(started.variables, _USES_FSDP):
        return started
    alone = started.processes == 1 and not started.is_ranked
    deepspeed = values.get("deepspeed") or document.get("distributed_type") == "DEEPSPEED"
    if alone or deepspeed or started.on_cpu or values.get("use_cpu"):
        others = {name: value for name, value in started.variables.items() if name != _USES_FSDP}
        return replace(started, variables=others)
    if started.variables.get("FSDP_VERSION") != "2":
        raise UnreadError(
            f"{_USES_FSDP}, which an earlier training in this process may have set, chooses FSDP in its first version,"
            " which is not traced.",
            hint=f"Unset {_USES_FSDP}, or set FSDP_VERSION=2.",
        )
    kept = {name: value for name, value in document.items() if name != "fsdp_config"}
    return replace(started, document={**kept, "distributed_type": "FSDP"})


def _is_true(variables: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is set to true (accelerate 1.15, ``Accelerator.__init__``)."""
    return variables.get(name, "").lower() == "true"


def engine_args(
    document: Mapping[str, object],
    config: Configuration,
    processes: int | None = None,
    *,
    variables: Mapping[str, str] = NO_VARIABLES,
    accumulation: int | str = 1,
) -> Mapping[str, object]:
    """Return the fields ``deepspeed``, ``fsdp``, ``fsdp_config`` and ``parallelism_config`` of a training.

    The trainer's own configuration has precedence over accelerate's, as in transformers.

    Args:
        document: accelerate's document; empty without one.
        processes: number of started processes; None if it is not known.
        variables: variables that accelerate reads in each process (:attr:`Launching.variables`).
        accumulation: gradient accumulation of a DeepSpeed document in accelerate's file that does not set it;
            accelerate's default is 1 (DeepSpeedPlugin).

    Raises:
        InputError: a named file cannot be read, accelerate refuses the groups of processes, or transformers refuses
            the combination of DeepSpeed's document and the trainer's arguments.
        UnreadError: the documents have a setting that cannot be traced.
    """
    found: dict[str, object] = {}
    kind = str(document.get("distributed_type", "NO"))
    if kind not in _KINDS:
        raise UnreadError(f"distributed_type: {kind} is not supported: DDP, FSDP2 and DeepSpeed are.")
    deepspeed, stage = deepspeed_document(document, config, accumulation), None
    if deepspeed is not None:
        if mapping(deepspeed.get("tensor_parallel")).get("autotp_size") not in (None, 0, 1):
            raise UnreadError("tensor_parallel in DeepSpeed's document is not traced. Leave it out.")
        check_devices(deepspeed)
        found["deepspeed"] = with_auto(deepspeed, config, processes)
        stage = mapping(deepspeed.get("zero_optimization")).get("stage")
        if stage == ZERO_STAGES["zero3"] and config.values.get("sync_ref_model"):
            raise UnreadError(f"{SYNCHRONISED_WHOLE}.")
    elif config.values.get("fsdp") or document.get("distributed_type") == "FSDP":
        if processes == 1:
            raise UnreadError(_UNTRACED_FSDP)
        found |= fsdp_args(fsdp_keys(document, config, variables))
    engine = next((name for name in ("deepspeed", "fsdp") if name in found), "")
    if engine:
        _check_engine(engine, found, config, stage)
    parallel = process_groups(group_sizes(document, config), document, engine, processes)
    return {**found, FIELD: parallel} if parallel else found


def check_documents(started: Launching, config: Configuration) -> None:
    """Check that accelerate accepts the sharding settings of a training, and that they are supported.

    Raises:
        InputError: accelerate refuses DeepSpeed's document together with its own keys (``_deepspeed_config_checks``),
            transformers refuses FSDP of a single process (transformers 5.23, ``Trainer.__init__``), or FSDP offloads
            without a backend for the host.
        UnreadError: options on accelerate's command line choose or configure an engine, or only a variable does.
    """
    document = started.document
    keys = mapping(document.get("deepspeed_config"))
    own = bool(config.values.get("deepspeed"))
    refused = [name for name in keys if name.lower() in fields_of_kind("deepspeed", "refused")]
    refused += [PRECISION] if document.get(PRECISION) is not None and not started.precision_by_option else []
    if document.get("distributed_type") == "DEEPSPEED" and refused and (own or keys.get(NAMED)):
        named = "deepspeed" if own else NAMED
        raise InputError(
            f"{named} and accelerate's own {', '.join(refused)} both set DeepSpeed, which accelerate refuses.",
            hint="Leave these keys out of accelerate's file: DeepSpeed's document or the trainer sets them.",
        )
    alone = started.processes == 1 and not (started.is_ranked or started.is_guessed)
    if config.values.get("fsdp") and alone and not config.values.get("deepspeed"):
        raise InputError(
            "fsdp of a single process without a rank: transformers refuses it, and FSDP has nothing to shard there.",
            hint="Write num_processes: 2 or more, or leave fsdp out.",
        )
    _check_offload(started, config)
    check_choices(started.variables, document, config)
    words = [name for name in started.flags if name not in fields_of_kind("deepspeed")]
    if words:
        raise UnreadError(
            f"--{words[0]} configures sharding on accelerate's command line; a check reads it only from files. Name a"
            " file with accelerate_config."
        )


def check_choices(variables: Mapping[str, str], document: Mapping[str, object], config: Configuration) -> None:
    """Check that no variable alone chooses an engine or groups of processes, or sets DeepSpeed's document.

    Args:
        variables: variables that accelerate reads in each process.
        document: accelerate's document; empty without one.

    Raises:
        UnreadError: one does.
    """
    for kind in _CHOICES:
        name, field = f"ACCELERATE_USE_{kind}", kind.lower()
        in_files = document.get("distributed_type") == kind or document.get(field) or config.values.get(field)
        if _is_true(variables, name) and not in_files:
            raise UnreadError(
                f"{name} chooses an engine, which a check reads only from files. Name a file with accelerate_config, or"
                " unset the variable, which an earlier training in this process may have set."
            )
    launched = document.get("distributed_type") == "DEEPSPEED" and not config.values.get("deepspeed")
    for name, key in DEEPSPEED_VARIABLES.items() if launched else ():
        if name in variables:
            raise UnreadError(
                f"{name} sets DeepSpeed's document, which a check reads only from files. Write {key} under"
                " deepspeed_config in accelerate's file, or unset the variable."
            )


def _check_offload(started: Launching, config: Configuration) -> None:
    """Check that several processes on GPUs whose FSDP offloads have a backend for the host.

    Raises:
        InputError: they have none.
    """
    keys = fsdp_keys(started.document, config, started.variables)
    needed = offload_variables({"fsdp": bool(keys), "fsdp_config": keys})
    on_gpus = started.processes > 1 and not config.values.get("use_cpu")
    if needed and on_gpus and not _has_host_backend(started, config):
        raise InputError(
            "With cpu_offload in fsdp_config, the first step fails: the norm of gradients is summed over processes on"
            " the host, which NCCL does not support.",
            hint=f"Set {' and '.join(needed)} to true (env in TRL's file): accelerate then adds gloo.",
        )


def _has_host_backend(started: Launching, config: Configuration) -> bool:
    """Return whether processes on GPUs start gloo as well (accelerate 1.15, ``PartialState.__init__``)."""
    launched = launched_fsdp(started.document, started.variables)
    chosen = _is_true(started.variables, _USES_FSDP) or started.document.get("distributed_type") == "FSDP"
    adds = launched.get("cpu_offload") is True or launched.get(SAVED) == "FULL_STATE_DICT"
    return (chosen and adds) or "gloo" in str(config.values.get("ddp_backend"))


def _check_engine(engine: str, found: Mapping[str, object], config: Configuration, stage: object) -> None:
    """Check that transformers accepts the trainer's arguments with an engine.

    Args:
        found: the engine's fields, as :func:`engine_args` returns them.
        stage: DeepSpeed's ZeRO stage; None with another engine.

    Raises:
        InputError: it does not (transformers 5.23, ``Trainer.create_accelerator_and_postprocess``, ``__init__``).
    """
    values, refused, hint = config.values, "", "Leave one of them out."
    if engine == "deepspeed" and values.get("fsdp"):
        refused = "fsdp together with DeepSpeed"
    elif stage == ZERO_STAGES["zero3"] and values.get("auto_find_batch_size"):
        refused = "auto_find_batch_size with ZeRO-3"
    elif values.get("save_only_model") and values.get("load_best_model_at_end"):
        refused = f"save_only_model and load_best_model_at_end with {engine}"
    elif values.get("save_only_model") and mapping(found.get("fsdp_config")).get(SAVED) == SHARDED:
        refused = f"save_only_model with fsdp_{SAVED}: {SHARDED}, which is accelerate's default for FSDP2"
        hint = f"Write fsdp_{SAVED}: FULL_STATE_DICT, or leave save_only_model out."
    if refused:
        raise InputError(f"transformers refuses {refused}.", hint=hint)


def group_sizes(document: Mapping[str, object], config: Configuration) -> Mapping[str, object]:
    """Return the group sizes above 1, and the other fields that then affect a step, by ``ParallelismConfig``'s names.

    Args:
        document: accelerate's document; empty without one.

    Raises:
        InputError: accelerate fails on a key, or ignores it.
        UnreadError: a setting cannot be traced.
    """
    if isinstance(config.values.get(FIELD), Mapping):
        raise InputError(
            f"{FIELD} cannot be in the trainer's own file: accelerate needs an object, gets a mapping, and fails.",
            hint=f"Write {PARALLELISM}{_SHARDS} and so on under {FIELD} in the file that accelerate_config names.",
        )
    given = document.get(FIELD) or {}
    if not isinstance(given, Mapping):
        raise InputError(f"{FIELD}: {given!r} is not a mapping.", hint=f"Write {PARALLELISM}{_SHARDS} and so on in it.")
    keys = {str(name).removeprefix(PARALLELISM): value for name, value in given.items()}
    refused: Mapping[str, str] = tables()["groups"]["refused"]
    names = (*_PLANNED, *refused)
    for name in given:
        read = {*names, _CP_STRATEGY, *fields_of_kind("groups")}
        if not str(name).startswith(PARALLELISM) or str(name).removeprefix(PARALLELISM) not in read:
            known = ", ".join(PARALLELISM + size for size in names)
            raise InputError(
                f"{name} under {FIELD} is a key that accelerate does not read.", hint=f"Sizes are {known}."
            )
    sizes = {name: keys[name] for name in names if keys.get(name) is not None}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{PARALLELISM}{name}: {value!r} is not a group size.", hint="Write 1 or more.")
    sizes = {name: value for name, value in sizes.items() if value != 1}
    for name, reason in refused.items():
        if name in sizes:
            raise UnreadError(f"{PARALLELISM}{name}: {sizes[name]} is not planned: {reason}.")
    strategy = keys.get(_CP_STRATEGY) if _CONTEXT_PARALLEL in sizes else None
    return {**sizes, _CP_STRATEGY: strategy} if strategy else sizes


def process_groups(
    groups: Mapping[str, object], document: Mapping[str, object], engine: str, processes: int | None
) -> Mapping[str, object]:
    """Return the process groups of a training.

    Args:
        groups: as :func:`group_sizes` returns them.
        engine: the field of the engine, ``fsdp`` or ``deepspeed``; empty without one.
        processes: number of started processes; None if it is not known.

    Raises:
        InputError: accelerate refuses them (``ParallelismConfig._validate_accelerator``).
        UnreadError: they have no supported engine.
    """
    replicas, shards, shared = (int(str(groups.get(name, 1))) for name in _PLANNED)
    made, named = replicas * shards * shared, [name for name in _PLANNED if name in groups]
    product = " x ".join(f"{name}={groups[name]}" for name in named)
    if made > 1 and processes is not None and made != processes:
        started = "1 process is" if processes == 1 else f"{processes} processes are"
        raise InputError(
            f"{FIELD} is for {made} processes ({product}), but {started} started: accelerate refuses this.",
            hint=f"The product of {', '.join(_PLANNED)} is num_processes; one that is absent is 1.",
        )
    if engine == "fsdp" and document.get(FIELD) and shards == shared == 1:
        raise InputError(
            f"{FIELD} leaves FSDP no processes to shard among ({_SHARDS} is 1): accelerate refuses this.",
            hint=f"Write the number of processes of a group as {PARALLELISM}{_SHARDS}, or leave {FIELD} out.",
        )
    if shared > 1 and engine != "fsdp":
        raise InputError(
            f"{PARALLELISM}{_CONTEXT_PARALLEL}: {shared} needs FSDP2: accelerate splits rows only with it.",
            hint="Write distributed_type: FSDP, and fsdp_version: 2 under fsdp_config.",
        )
    if shared > 1 and replicas > 1 and shards == 1:
        raise InputError(
            f"{product} leaves each replica one process per part of a row and none to shard among: accelerate refuses"
            " this.",
            hint=f"{PARALLELISM}{_SHARDS} has to be 2 or more.",
        )
    if shards > 1 and not engine:
        raise UnreadError(f"{PARALLELISM}{_SHARDS}: {shards} is not planned without FSDP: only FSDP uses it.")
    if engine == "deepspeed" and groups:
        raise UnreadError(f"{FIELD} is not planned with DeepSpeed, which shards among all processes.")
    # Without an engine, replicas of one process each are plain data parallelism.
    return groups if engine else {}
