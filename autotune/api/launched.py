"""Reads from accelerate's state how the processes of a running training were started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.core.files.json_text import is_json
from autotune.emit.launch import PARALLELISM
from autotune.errors import InputError
from autotune.userconfig.deepspeed import AUTO, SIZES
from autotune.userconfig.fsdp import UNTRACED_KEYS
from autotune.userconfig.launch import NOT_LAUNCHED, Launching

if TYPE_CHECKING:
    import transformers

_PARALLEL = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
# Variables for the number of processes on a machine: torchrun's and accelerate's, and DeepSpeed's own
# (deepspeed 0.19, ``launcher/launch.py``).
_ON_A_MACHINE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def launching_of(args: transformers.TrainingArguments, state: Any) -> Launching:
    """Return how the processes of a training were started, as accelerate resolved it.

    A single process may also have an engine: DeepSpeed offloads from one GPU.

    Args:
        state: accelerate's ``AcceleratorState``; None: it is not known, since no trainer was found.

    Raises:
        InputError: the state of several processes is not known.
    """
    if state is None and args.world_size > 1:
        raise InputError(
            f"The trainer of these {args.world_size} processes was not found, so their engine is not known.",
            hint="Pass the callback to the trainer (callbacks=[…]), and do not call it yourself.",
        )
    if state is None:
        return NOT_LAUNCHED
    kind = state.distributed_type.value
    document: dict[str, object] = {"distributed_type": kind}
    if kind == "DEEPSPEED":
        document["deepspeed_config"] = {"deepspeed_config_file": _deepspeed(state.deepspeed_plugin.deepspeed_config)}
    elif kind == "FSDP":
        document["fsdp_config"] = _fsdp(state.fsdp_plugin)
    parallel = getattr(state, "parallelism_config", None)
    sizes = {name: getattr(parallel, name, None) or 1 for name in _PARALLEL}
    if any(size > 1 for size in sizes.values()):
        document["parallelism_config"] = {PARALLELISM + name: size for name, size in sizes.items() if size > 1}
    on_each = next((os.environ[name] for name in _ON_A_MACHINE if os.environ.get(name)), args.world_size)
    machines = max(1, args.world_size // int(on_each))
    return Launching(
        args.world_size, True, machines, precision=args.mixed_precision,
        dynamo=state.dynamo_plugin.backend.value.lower(), document=document, is_observed=True,
    )  # fmt: skip


def _deepspeed(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return DeepSpeed's document with the sizes that transformers filled in set back to ``auto``."""
    kept = {name: value for name, value in document.items() if is_json(value)}
    return {**kept, **dict.fromkeys(SIZES, AUTO)}


def _fsdp(plugin: Any) -> Mapping[str, object]:
    """Return accelerate's FSDP document for the plugin that accelerate built from it."""
    found: dict[str, object] = {
        "fsdp_version": plugin.fsdp_version,
        "fsdp_reshard_after_forward": plugin.reshard_after_forward,
        "fsdp_offload_params": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
        "fsdp_state_dict_type": plugin.state_dict_type.name,
        **{f"fsdp_{name}": bool(getattr(plugin, name, False)) for name in UNTRACED_KEYS},
    }
    if plugin.min_num_params:
        return {**found, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": plugin.min_num_params}
    if plugin.auto_wrap_policy is None:
        return {**found, "fsdp_auto_wrap_policy": "NO_WRAP"}
    wrapped = plugin.transformer_cls_names_to_wrap
    named = {"fsdp_transformer_layer_cls_to_wrap": list(wrapped)} if wrapped else {}
    return {**found, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **named}
