"""Finds the keys of a base that stand for entries of a plan, under the names that a file may have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.app.base.reading import UserBase
from autotune.core.plan import ALLOCATOR_VARIABLE
from autotune.techniques.sharding import ENGINE_FIELDS

Path = tuple[str, ...]
"""A key of the file, and before it the keys of the mappings around it."""

_KWARGS = "model_init_kwargs"
# The newer name of a field, which is the one that counts where a file has it (transformers' TrainingArguments).
_NEWER = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_OLDER_VARIABLES = {ALLOCATOR_VARIABLE: "PYTORCH_CUDA_ALLOC_CONF"}
_OLDER_KWARGS = {"dtype": "torch_dtype"}


def of_engine(path: str) -> bool:
    """Return whether an entry of a plan says what shards a training, which files of their own may say as well."""
    return path.split(".")[1:2] in ([name] for name in ENGINE_FIELDS)


def keys_of(base: UserBase, path: str) -> tuple[Path, ...]:
    """Return where in the file the entry at a path of a plan stands, or should."""
    head, *rest = path.split(".")
    if of_engine(path):
        return ()
    if head not in ("args", "model", "env"):
        return ()
    if head == "env":
        set_here = base.file.values.get("env")
        older = _OLDER_VARIABLES.get(rest[0])
        has_older = isinstance(set_here, Mapping) and older in set_here and rest[0] not in set_here
        return (("env", older if older is not None and has_older else rest[0]),)
    within = base.file.values.get(_KWARGS)
    names = (rest[0], _OLDER_KWARGS.get(rest[0], ""))
    if head == "model" and isinstance(within, Mapping) and any(name in within for name in names):
        # What stands there is used in place of the key at the top (trl/scripts).
        return tuple((_KWARGS, name) for name in names if name in within)
    if head == "args" and _NEWER.get(rest[0]) in base.file.values:
        return ((_NEWER[rest[0]],),)
    return (tuple(rest),)


def written_at(base: UserBase, key: Path) -> tuple[object, ...]:
    """Return the value of a key as it is in the file, alone; nothing if it is not there."""
    value: Any = base.file.values
    for name in key:
        if not isinstance(value, Mapping) or name not in value:
            return ()
        value = value[name]
    return (value,)
