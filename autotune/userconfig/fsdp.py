"""Reads the keys of FSDP, from the trainer, from accelerate's document, and from accelerate's variables."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.configuration import Configuration
from autotune.core.files.nested import mapping
from autotune.errors import InputError, UnreadError

_FSDP = "fsdp_"
RENAMED: Mapping[str, str] = {"offload_params": "cpu_offload"}
"""Keys of accelerate's ``fsdp_config`` by transformers' names (``training_args.py``, ``_process_fsdp_args``)."""
# The same of accelerate's variables (accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin).
_VARIABLES: Mapping[str, str] = {**RENAMED, "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}
_WRAPS, _CHECKPOINTING = "auto_wrap_policy", "activation_checkpointing"
# Keys that change a step; the second set only if they are set.
_STEP_KEYS = frozenset({"reshard_after_forward", _WRAPS})
_KEYS_IF_SET = frozenset({"cpu_offload", "transformer_layer_cls_to_wrap", "min_num_params", _CHECKPOINTING})
UNTRACED_KEYS = ("activation_checkpointing_offload", "ignored_modules")
"""Keys that change a step in ways that no trace has."""
SAVED, SHARDED = "state_dict_type", "SHARDED_STATE_DICT"
"""The key for the form of a checkpoint, and its value for shards."""
_LOCAL = "LOCAL_STATE_DICT"
# Defaults of accelerate for keys that its document lacks (accelerate 1.15, FullyShardedDataParallelPlugin).
_ACCELERATE_DEFAULTS: Mapping[str, object] = {"version": 1, _WRAPS: "NO_WRAP", SAVED: SHARDED}
# The same, of its launcher, which always passes a number on; transformers' default is 0 (accelerate 1.15,
# `commands/launch.py`).
_MIN_WRAPPED: Mapping[str, Mapping[str, object]] = {"SIZE_BASED_WRAP": {"min_num_params": 100_000_000}}
_BOOLEANS = {"true": True, "false": False}
NO_VARIABLES: Mapping[str, str] = {}
"""The variables of a launch that sets none."""


def fsdp_keys(
    document: Mapping[str, object], config: Configuration, variables: Mapping[str, str] = NO_VARIABLES
) -> dict[str, object]:
    """Return FSDP's effective keys by transformers' names, with its version; empty without FSDP.

    With the trainer's own document, accelerate still reads the variables that it or its launcher sets for keys that
    transformers does not pass on.

    Args:
        document: accelerate's document; empty without one.
        variables: variables that accelerate reads in each process (:attr:`Launching.variables`).
    """
    launched = launched_fsdp(document, variables)
    if config.values.get("fsdp"):
        own = {name: value for name, value in own_fsdp(config).items() if name not in UNTRACED_KEYS}
        passed_on = {name for name, value in own.items() if value or name == _CHECKPOINTING}
        further = sorted({*_KEYS_IF_SET, *UNTRACED_KEYS} - passed_on)
        return {"version": 2, **own, **{name: launched[name] for name in further if launched.get(name)}}
    if document.get("distributed_type") != "FSDP":
        return {}
    keys = {**_ACCELERATE_DEFAULTS, **launched}
    policy = str(keys[_WRAPS]).upper()
    least = _MIN_WRAPPED.get(policy, {}) if document.get("fsdp_config") else {}
    return {**least, **keys, _WRAPS: policy}


def fsdp_args(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields ``fsdp`` and ``fsdp_config`` of a training with these keys.

    Raises:
        InputError: accelerate refuses a key.
        UnreadError: a key cannot be traced.
    """
    if str(keys["version"]) != "2":
        raise UnreadError("FSDP in its first version is not traced: transformers removes it. Write fsdp_version: 2.")
    if str(keys.get(SAVED)).upper() == _LOCAL:
        raise InputError(f"accelerate refuses {_FSDP}{SAVED}: {_LOCAL} with FSDP2.", hint=f"Write {SHARDED}.")
    untraced = next((name for name in UNTRACED_KEYS if keys.get(name)), None)
    if untraced is not None:
        raise UnreadError(f"{_FSDP}{untraced} is not traced. Leave it out.")
    kept = {name: value for name, value in keys.items() if name in _STEP_KEYS or (name in _KEYS_IF_SET and value)}
    # Without the key, transformers gathers what a checkpoint holds on the first rank.
    saved = {SAVED: SHARDED} if str(keys.get(SAVED)).upper() == SHARDED else {}
    return {"fsdp": True, "fsdp_config": {**kept, **saved, "version": 2}}


def loading_text(document: Mapping[str, object], config: Configuration) -> str | None:
    """Return a sentence on the effect of FSDP's ``cpu_ram_efficient_loading``; None if it is not set.

    accelerate broadcasts the weights of rank 0, but transformers has already read them on every rank
    (``tests/contract/test_trl_loading.py``).
    """
    if str(fsdp_keys(document, config).get("cpu_ram_efficient_loading")).lower() != "true":
        return None
    return (
        f"{_FSDP}cpu_ram_efficient_loading saves no host memory: transformers 5 reads the whole model in every"
        " process, and accelerate then discards it in all but the first."
    )


def own_fsdp(config: Configuration) -> dict[str, object]:
    """Return the trainer's own ``fsdp_config``, without the prefix that its keys may have."""
    return {own_name(name): value for name, value in mapping(config.values.get("fsdp_config")).items()}


def own_name(name: str) -> str:
    """Return a key of an ``fsdp_config`` without the prefix that it may have."""
    return name.removeprefix(_FSDP)


def launched_fsdp(document: Mapping[str, object], variables: Mapping[str, str] = NO_VARIABLES) -> dict[str, object]:
    """Return the keys of FSDP in accelerate's document and in variables, by transformers' names."""
    section = mapping(document.get("fsdp_config")) if document.get("distributed_type") == "FSDP" else {}
    in_variables = {name.lower(): value for name, value in variables.items() if name.lower().startswith(_FSDP)}
    return {**_translated(section, RENAMED), **_translated(in_variables, _VARIABLES)}


def _translated(given: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Return keys by transformers' names, without those that accelerate does not read: transformers' own.

    Args:
        names: transformers' names by accelerate's, where they differ.
    """
    keys = {own_name(name): _value(value) for name, value in given.items() if value is not None}
    return {names.get(name, name): value for name, value in keys.items() if name not in names.values()}


def _value(given: object) -> object:
    """Return the boolean or number that a text names, in either case; other values unchanged.

    The launcher passes text on, which accelerate parses; transformers needs booleans.
    """
    text = str(given).lower()
    return _BOOLEANS.get(text, int(text) if text.isdecimal() else given)
