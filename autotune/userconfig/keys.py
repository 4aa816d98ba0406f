"""Finds the keys of a configuration file for entries of a plan, under the file's own names."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.nested import Key, mapping
from autotune.core.plan import ALLOCATOR_VARIABLE, OLD_ALLOCATOR_VARIABLE
from autotune.techniques.sharding import ENGINE_FIELDS

PARTS = ("args", "model", "env")
"""Parts of a plan that a configuration file has keys for."""
_KWARGS = "model_init_kwargs"
# The newer name of a field, which is the one that counts where a file has it (transformers' TrainingArguments).
_NEWER = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_OLDER_VARIABLES = {ALLOCATOR_VARIABLE: OLD_ALLOCATOR_VARIABLE}
_OLDER_KWARGS = {"dtype": "torch_dtype"}


def of_engine(path: str) -> bool:
    """Return whether an entry of a plan configures the sharding, which separate files may configure as well."""
    return path.split(".")[1:2] in ([name] for name in ENGINE_FIELDS)


def of_groups(path: str) -> bool:
    """Return whether an entry of a plan is the size of a group of processes."""
    return path.startswith("args.parallelism_config.")


def engine_key(path: str) -> str:
    """Return the user's name of an entry of an engine, such as ``zero_optimization.stage``."""
    return path.partition(".")[2].removeprefix("deepspeed.")


def keys_of(values: Mapping[str, object], path: str) -> tuple[Key, ...]:
    """Return the keys in a file for the entry at a path of a plan; empty if there is no key.

    Args:
        values: the keys and values of the file.
    """
    part, *names = path.split(".")
    if part not in PARTS:
        return ()
    first, *inner = names
    if part == "env":
        set_here, older = mapping(values.get("env")), _OLDER_VARIABLES.get(first, "")
        return (("env", older if older in set_here and first not in set_here else first),)
    within = mapping(values.get(_KWARGS))
    kwargs = [name for name in (first, _OLDER_KWARGS.get(first, "")) if name in within]
    if part == "model" and kwargs:
        # What stands there is used in place of the key at the top (trl/scripts).
        return tuple((_KWARGS, name) for name in kwargs)
    if part == "args" and _NEWER.get(first) in values:
        first = _NEWER[first]
    # transformers takes both spellings, and that with its prefix wins (training_args.py, `_process_fsdp_args`).
    if first == "fsdp_config" and inner and f"fsdp_{inner[0]}" in mapping(values.get(first)):
        inner[0] = f"fsdp_{inner[0]}"
    return ((first, *inner),)
