"""Reads from a running training what a check needs: its launch, its available memory, and its optimizer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.core.files.json_text import is_json
from autotune.emit.launch import PARALLELISM
from autotune.errors import InputError
from autotune.inspection.gpus import UNMEASURED_CONTEXT_BYTES, listed_gpu
from autotune.userconfig.deepspeed import AUTO, SIZES
from autotune.userconfig.fsdp import UNTRACED_KEYS
from autotune.userconfig.launch import NOT_LAUNCHED, Launching

if TYPE_CHECKING:
    import transformers

_PARALLEL = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
# Variables for the number of processes on a machine: torchrun's and accelerate's, and DeepSpeed's own
# (deepspeed 0.19, ``launcher/launch.py``).
_ON_A_MACHINE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
LIBRARIES = ("trl", "transformers")
_OF_GROUPS = frozenset({"lr", "weight_decay"})
"""Options that transformers sets for each group of weights; the defaults of an optimizer may be others."""
_PLAIN = (bool, int, float, str, type(None))


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


def available_bytes(args: Any, trainer: Any) -> int | None:
    """Return the memory available to the training: free memory plus the memory that it already uses.

    Memory of the process outside the training, such as a model of an earlier notebook cell, does not become available.

    Returns:
        The bytes; None on a CPU.

    Raises:
        InputError: the training is on another kind of device.
        RuntimeError: CUDA fails.
    """
    if args.device.type == "cpu":
        return None
    if args.device.type != "cuda":
        raise InputError(
            f"A training on {args.device.type} is not traced, only one on a CPU or on a GPU of CUDA or ROCm."
        )
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(args.device)
    held_bytes, own_bytes = torch.cuda.memory_reserved(args.device), _own_bytes(args, trainer)
    if own_bytes is not None:
        held_bytes -= max(0, torch.cuda.memory_allocated(args.device) - own_bytes)
    gpu = listed_gpu(torch.cuda.get_device_name(args.device))
    context_bytes = gpu.context_bytes if gpu is not None else UNMEASURED_CONTEXT_BYTES
    available: int = min(total_bytes, free_bytes + held_bytes + context_bytes)
    return available


def _own_bytes(args: Any, trainer: Any) -> int | None:
    """Return the bytes of a trainer's models and optimizer state on its device, which a trace counts as well.

    None if the training holds further memory there: of an engine, of vLLM, or of a quantised model.
    """
    import torch

    if trainer is None or args.world_size > 1 or getattr(args, "use_vllm", False):
        return None
    if trainer.is_deepspeed_enabled or getattr(trainer.model, "is_quantized", False):
        return None
    models = [part for part in vars(trainer).values() if isinstance(part, torch.nn.Module)]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    states = trainer.optimizer.state.values() if trainer.optimizer is not None else ()
    tensors += [part for state in states for part in state.values() if isinstance(part, torch.Tensor)]
    sizes: dict[int, int] = {id(each): each.nbytes for each in tensors if each.device.type == args.device.type}
    return sum(sizes.values())


def check_optimizer(trainer: Any) -> None:
    """Check that a trainer has the optimizer that ``args.optim`` names, as a trace assumes.

    The optimizer exists when training begins (transformers 5.23, ``Trainer._prepare_for_training``), in a wrapper of
    accelerate. It counts as the named one if it has the same class and the same switches, such as ``fused``, which
    decide on temporary memory. DeepSpeed discards an optimizer that is passed to the trainer (``deepspeed_init``) and
    replaces others: with it, the trainer may have no other way of creating one.

    Raises:
        InputError: it has another optimizer, or may have one.
    """
    if trainer is None:
        return
    from transformers import Trainer

    if trainer.is_deepspeed_enabled:
        method = getattr(type(trainer), "create_optimizer", Trainer.create_optimizer)
        own_method = method.__module__.partition(".")[0] not in LIBRARIES
        if own_method or getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
            raise InputError("The trainer creates its own optimizer, which is not traced.")
        return
    own = trainer.optimizer
    while type(own).__module__.partition(".")[0] == "accelerate":
        own = own.optimizer
    try:
        # Without the model, to which some optimizers would add hooks; these are refused, and not compared.
        kind, options = Trainer.get_optimizer_cls_and_kwargs(trainer.args, None)
    except (ValueError, ImportError):
        return
    if type(own) is not kind or not _has_switches(own, kind, options):
        name, named = f"{type(own).__module__.partition('.')[0]}'s {type(own).__name__}", trainer.args.optim.value
        raise InputError(f"The trainer has its own optimizer ({name}), not optim={named}: it is not traced.")


def _has_switches(own: Any, kind: type[Any], options: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has the switches and whole numbers with which its class would be created."""
    wanted = {name: each.default for name, each in inspect.signature(kind).parameters.items()} | dict(options)
    # bitsandbytes keeps some in an object of its own.
    held = {**vars(own), **getattr(getattr(own, "args", None), "__dict__", {}), **own.defaults}
    return all(
        held[name] == value
        for name, value in wanted.items()
        if name not in _OF_GROUPS and isinstance(value, bool | int | None) and isinstance(held.get(name, own), _PLAIN)
    )
