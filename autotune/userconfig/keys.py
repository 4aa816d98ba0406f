"""Maps entries of a training plan to keys of a configuration file, and determines which entries the file can set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.core.configuration import Configuration
from autotune.core.files.nested import Key, lookup, mapping, set_or_remove
from autotune.techniques.sharding import ENGINE_FIELDS
from autotune.trainers.declared import LOADING
from autotune.userconfig.launch import Launching

PARTS = ("args", "model", "env")
"""Parts of a plan that a configuration file can set."""
# Newer names of fields, which take precedence if a file has them (transformers' TrainingArguments).
_NEWER = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_DEEPSPEED, _FSDP, _FSDP_CONFIG, _GROUPS = ENGINE_FIELDS
_STAGE = f"args.{_DEEPSPEED}.zero_optimization.stage"
# Values of accelerate's ``distributed_type`` that leave the engine to the trainer's own fields.
_NO_ENGINE_TYPES = frozenset({"NO", "MULTI_GPU", "MULTI_CPU"})


def configures_engine(path: str) -> bool:
    """Return whether an entry of a plan configures the sharding, which separate files may configure as well."""
    return path.split(".")[1:2] in ([name] for name in ENGINE_FIELDS)


def sizes_process_group(path: str) -> bool:
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
        return (("env", first),)
    if part == "model" and first in mapping(values.get(LOADING)):
        # A nested value takes precedence over the top-level key (trl/scripts).
        return ((LOADING, first),)
    if part == "args" and _NEWER.get(first) in values:
        first = _NEWER[first]
    # transformers takes both spellings; the one with the prefix wins (training_args.py, `_process_fsdp_args`).
    if first == "fsdp_config" and inner and f"fsdp_{inner[0]}" in mapping(values.get(first)):
        inner[0] = f"fsdp_{inner[0]}"
    return ((first, *inner),)


@dataclass(frozen=True)
class Writable:
    """The entries of a plan that the trainer's own file can set.

    Attributes:
        values: the keys of the file and their values; empty without a file.
        fixed: engine fields that are set elsewhere, or whose change would have no effect.
    """

    values: Mapping[str, object]
    fixed: frozenset[str]

    def allows(self, entries: Mapping[str, object]) -> bool:
        """Return whether the file can set these entries, given by their path in a plan, with the same effect.

        An engine in the file stays: replacing its document would lose keys that belong to no technique.
        """
        if _STAGE in entries and entries[_STAGE] is None and self.values.get(_DEEPSPEED):
            return False
        heads = [path.split(".")[:2] for path in entries]
        return all(head[0] in PARTS and not (head[0] == "args" and head[1] in self.fixed) for head in heads)

    def keys(self, entries: Mapping[str, object]) -> Mapping[Key, object]:
        """Return the keys to write for entries of a plan, with their values; None removes a key.

        In a mapping that the file has, only changed keys are written; a new mapping is written whole.
        """
        found: dict[Key, object] = {}
        for key, value in ((key, value) for path, value in entries.items() for key in keys_of(self.values, path)):
            outer = self.values.get(key[0])
            if len(key) == 1 or key[0] == "env" or isinstance(outer, Mapping):
                if value is not None or not self.values or lookup(self.values, key):
                    found[key] = value
            elif value is not None:
                whole = found.setdefault(key[:1], {})
                assert isinstance(whole, dict)
                set_or_remove(whole, key[1:], value)
        return found


def writable(values: Mapping[str, object], config: Configuration, started: Launching, *, on_cpu: bool) -> Writable:
    """Return the entries that the trainer's own file can set.

    The trainer's file cannot change an engine of accelerate's document: transformers ignores ``fsdp_config`` without
    ``fsdp``, and accelerate refuses ``deepspeed`` together with its own DeepSpeed keys.

    Args:
        values: the keys of the file; empty without one.
        config: the values as read by TRL's parser.
        started: the launch of the processes.
        on_cpu: whether it trains on a CPU, where transformers fills in DeepSpeed's document before the process group
            exists.
    """
    # accelerate requires an object for this field, which YAML cannot express.
    fixed = {_GROUPS}
    if config.values.get(_DEEPSPEED):
        fixed |= {_FSDP, _FSDP_CONFIG}
        fixed |= set() if isinstance(values.get(_DEEPSPEED), Mapping) else {_DEEPSPEED}
    elif config.values.get(_FSDP):
        fixed |= {_DEEPSPEED, _FSDP}
        inline = values.get(_FSDP) is True and isinstance(values.get(_FSDP_CONFIG, {}), Mapping)
        fixed |= set() if inline else {_FSDP_CONFIG}
    elif str(started.document.get("distributed_type", "NO")) not in _NO_ENGINE_TYPES or started.document.get(_GROUPS):
        fixed |= set(ENGINE_FIELDS)
    elif on_cpu:
        fixed |= {_DEEPSPEED}
    return Writable(values, frozenset(fixed))
