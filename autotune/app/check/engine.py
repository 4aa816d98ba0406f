"""Reads what shards a training from accelerate's and DeepSpeed's documents, as fields of a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autotune.app.check.groups import FIELD, groups_of, started_by
from autotune.app.check.launch import Launching
from autotune.app.check.task import UnreadError
from autotune.core.configuration import Configuration
from autotune.errors import InputError
from autotune.techniques.sharding import ENGINE_FIELDS

_FSDP = "fsdp_"
# Keys of accelerate's fsdp_config by those of transformers' (transformers/training_args.py, _process_fsdp_args).
_RENAMED = {"offload_params": "cpu_offload"}
# Keys that a step depends on; the second ones only where they are set.
_OF_A_STEP = frozenset({"reshard_after_forward", "auto_wrap_policy"})
_IF_SET = frozenset({"cpu_offload", "transformer_layer_cls_to_wrap", "min_num_params", "activation_checkpointing"})
# Stage, offloading and clipping by accelerate's own keys (accelerate/utils/dataclasses.py, DeepSpeedPlugin).
_DEVICES = {"offload_optimizer": "offload_optimizer_device", "offload_param": "offload_param_device"}
_AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_DEFAULT_STAGE = 2
# Keys of accelerate's own that it refuses beside DeepSpeed's document, whatever they say (accelerate 1.15).
_REFUSED_BESIDE = frozenset({
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
})  # fmt: skip
_PRECISION, _NAMED = "mixed_precision", "deepspeed_config_file"
# Words for accelerate about DeepSpeed on which no step depends.
_OF_LAUNCHERS = frozenset({
    "deepspeed_exclusion_filter", "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher",
    "zero3_init_flag", "zero3_save_16bit_model",
})  # fmt: skip


def without_engine(config: Configuration) -> Configuration:
    """Return a configuration in which nothing shards the training."""
    unset = {name: config.defaults.get(name) for name in ENGINE_FIELDS if name in config.values}
    return replace(config, values={**config.values, **unset})


def engine_args(
    document: Mapping[str, object], config: Configuration, folder: Path, processes: int | None = None
) -> Mapping[str, object]:
    """Return the fields ``deepspeed``, ``fsdp``, ``fsdp_config`` and ``parallelism_config`` of a training.

    What the trainer's own configuration says comes before what accelerate's says, as in transformers.

    Args:
        document: of ``accelerate launch --config_file``; empty without one.
        folder: from which relative paths in the documents lead.
        processes: how many are started; None where that is not known.

    Raises:
        InputError: a file that is named cannot be read, or accelerate refuses the groups of processes.
        UnreadError: the documents ask for what cannot be traced.
    """
    own, kind = config.values, str(document.get("distributed_type", "NO"))
    found: dict[str, object] = {}
    if own.get("deepspeed"):
        found["deepspeed"] = _document(own["deepspeed"], folder)
    elif kind == "DEEPSPEED":
        given = document.get("deepspeed_config")
        found["deepspeed"] = _deepspeed(given if isinstance(given, Mapping) else {}, folder)
    elif own.get("fsdp"):
        found |= _fsdp(_fsdp_keys(document, config), default_version=2)
    elif kind == "FSDP":
        found |= _fsdp(_fsdp_keys(document, config), default_version=1)
    engine = next((name for name in ("deepspeed", "fsdp") if name in found), "")
    parallel = started_by(groups_of(document, config), document, engine, processes)
    return {**found, FIELD: parallel} if parallel else found


def check_documents(started: Launching, config: Configuration) -> None:
    """Check that what says how a training is sharded goes together, and is read.

    Raises:
        InputError: accelerate refuses DeepSpeed's document beside its own keys (``_deepspeed_config_checks``).
        UnreadError: words for accelerate choose an engine, or set it.
    """
    document = started.document
    given = document.get("deepspeed_config")
    keys = given if isinstance(given, Mapping) else {}
    own = bool(config.values.get("deepspeed"))
    beside = [name for name in keys if name.lower() in _REFUSED_BESIDE]
    beside += [_PRECISION] if document.get(_PRECISION) is not None and not started.precise else []
    if document.get("distributed_type") == "DEEPSPEED" and beside and (own or keys.get(_NAMED)):
        named = "deepspeed" if own else _NAMED
        raise InputError(
            f"{named} and accelerate's own {', '.join(beside)} both set DeepSpeed, which accelerate refuses.",
            hint="Leave these keys out of accelerate's file; DeepSpeed's document says such things, or the trainer.",
        )
    words = [name for name in started.flags if name not in _OF_LAUNCHERS]
    if words:
        raise UnreadError(
            f"--{words[0]} sets by words for accelerate what shards the training, and a check reads that from files."
            " Name one with accelerate_config."
        )


def _deepspeed(given: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """Return DeepSpeed's document as accelerate makes it of its own keys, or reads it from the file that these name."""
    if given.get("deepspeed_config_file"):
        return _document(given["deepspeed_config_file"], folder)
    zero: dict[str, object] = {"stage": given.get("zero_stage", _DEFAULT_STAGE)}
    zero |= {name: {"device": given[key]} for name, key in _DEVICES.items() if str(given.get(key) or "none") != "none"}
    if given.get("zero3_save_16bit_model"):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    clipping = {"gradient_clipping": given["gradient_clipping"]} if given.get("gradient_clipping") else {}
    # accelerate passes on that the precision is the trainer's.
    precision = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    return {
        **dict.fromkeys(_AUTO, "auto"),
        "zero_optimization": zero,
        **clipping,
        **precision,
        "zero_allow_untested_optimizer": True,
    }


def _fsdp(keys: Mapping[str, object], *, default_version: int) -> Mapping[str, object]:
    if str(keys.get("version", default_version)) != "2":
        raise UnreadError("FSDP in its first version is not traced: transformers removed it. Write fsdp_version: 2.")
    kept = {name: value for name, value in keys.items() if name in _OF_A_STEP or (name in _IF_SET and value)}
    return {"fsdp": True, "fsdp_config": {**kept, "version": 2}}


def said_of_loading(document: Mapping[str, object], config: Configuration) -> str | None:
    """Return what comes of FSDP's ``cpu_ram_efficient_loading``; None where it is not set.

    accelerate then shares out the weights of the first process alone, and transformers has read them in every process
    by then (``tests/contract/test_trl_loading.py``).
    """
    if str(_fsdp_keys(document, config).get("cpu_ram_efficient_loading")).lower() != "true":
        return None
    return (
        f"{_FSDP}cpu_ram_efficient_loading takes no host memory away: transformers 5 reads the whole model in every"
        " process, and accelerate then drops what all but the first have read."
    )


def _fsdp_keys(document: Mapping[str, object], config: Configuration) -> dict[str, object]:
    """Return the document of FSDP that counts, the trainer's own or accelerate's; empty without."""
    fsdp = str(document.get("distributed_type")) == "FSDP"
    given = config.values.get("fsdp_config") if config.values.get("fsdp") else document.get("fsdp_config")
    return fsdp_named(given) if isinstance(given, Mapping) and (fsdp or config.values.get("fsdp")) else {}


def fsdp_named(given: Mapping[str, object]) -> dict[str, object]:
    """Return a document of FSDP, accelerate's or transformers', under the names of transformers."""
    keys = {str(name).removeprefix(_FSDP): value for name, value in given.items()}
    return {_RENAMED.get(name, name): value for name, value in keys.items()}


def _document(named: object, folder: Path) -> Mapping[str, object]:
    if isinstance(named, Mapping):
        return {str(name): value for name, value in named.items()}
    path = Path(str(named))
    path = path if path.is_absolute() or path.is_file() else folder / path
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"DeepSpeed's document {named} cannot be read: {error.strerror}.", hint="Give the path of a JSON file."
        ) from error
    except ValueError as error:
        raise InputError(f"DeepSpeed's document {named} is not JSON: {error}.") from error
    if not isinstance(read, dict):
        raise InputError(f"DeepSpeed's document {named} is no mapping.")
    return read
