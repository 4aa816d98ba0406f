"""Reads the engine of a base; refuses settings that no probe or bundle supports, and names the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autotune.core.configuration import Configuration
from autotune.core.nested import mapping
from autotune.core.plan import Launch, TrainingPlan
from autotune.errors import InputError, UnreadError
from autotune.techniques.base import Technique
from autotune.userconfig.deepspeed import AUTO
from autotune.userconfig.engine import check_compilation, engine_args, fsdp_named, with_precision
from autotune.userconfig.groups import FIELD
from autotune.userconfig.launch import Launching

DEEPSPEED, FSDP = "deepspeed", "fsdp_config"
"""The arguments of a plan that hold documents of engines."""
_KINDS = frozenset({"NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP"})
_OFFLOADED = frozenset({"none", "cpu"})
_STAGES = frozenset({1, 2, 3})
_COUNTED = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
_SEARCHED = ("version", "reshard_after_forward", "cpu_offload")
# Keys that transformers fills in, which TPUs alone read (transformers/training_args.py, `_process_fsdp_args`).
_FILLED = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")


def with_engine(plan: TrainingPlan, started: Launching, config: Configuration, place: str) -> TrainingPlan:
    """Return the plan of a base with what shards its training, and its number of processes.

    Sizes and precision in DeepSpeed's document become ``auto``, since they follow from the trainer's arguments.

    Raises:
        InputError: the file asks for what is not probed.
    """
    if started.machines > 1:
        raise _refused(place, f"num_machines: {started.machines}", "probes run on this machine", "Write 1.")
    if started.flags:
        where = "Name a file with accelerate_config, or write deepspeed or fsdp with fsdp_config."
        raise _refused(place, started.flags[0], "engines are read from files, not from arguments of accelerate", where)
    kind = str(started.document.get("distributed_type", "NO"))
    if kind not in _KINDS:
        raise _refused(
            place, f"distributed_type: {kind}", "probes train by DDP, FSDP2 or DeepSpeed", "Name one of them."
        )
    processes = started.processes if started.counted else None
    try:
        check_compilation(config, started)
        overruled = with_precision(config, started) is not config
        # Every file that a search writes has the accumulation of the trainer's arguments.
        found = dict(engine_args(started.document, config, processes, accumulation=AUTO))
    except (UnreadError, InputError) as error:
        raise InputError(f"{place}: {error.message}", hint=error.hint) from error
    if overruled:
        why = "bf16 and fp16 are false, and accelerate overrules them by it"
        raise _refused(place, f"mixed_precision: {started.precision}", why, f"Write {started.precision}: true.")
    groups = dict(mapping(found.pop(FIELD, None)))
    if "cp_comm_strategy" in groups:
        why = "context parallelism is searched with accelerate's default"
        raise _refused(place, f"cp_comm_strategy: {groups['cp_comm_strategy']}", why, "Leave it out.")
    # All processes sharding together is what FSDP2 does anyway.
    if groups != {"dp_shard_size": started.processes} and groups:
        found[FIELD] = groups
    if DEEPSPEED in found:
        found[DEEPSPEED] = _deepspeed(mapping(found[DEEPSPEED]), place)
    if mapping(found.get(FSDP)).get("activation_checkpointing"):
        instead = "Write gradient_checkpointing: true in its place."
        raise _refused(place, "fsdp_activation_checkpointing", "checkpointing is searched by TRL's own key", instead)
    return replace(plan, args={**plan.args, **found}, launch=Launch(started.processes))


def documents_of(plan: TrainingPlan, techniques: Iterable[Technique]) -> dict[str, Mapping[str, object]]:
    """Return a base's engine documents without the entries of techniques, by path in a plan."""
    of_choices = {path for technique in techniques for path in technique.identified_by or technique.writes}
    return {
        f"args.{name}": _without(mapping(plan.args[name]), f"args.{name}", of_choices)
        for name in (DEEPSPEED, FSDP)
        if name in plan.args
    }


def fsdp_keys(started: Launching, config: Configuration, plan: TrainingPlan) -> Mapping[str, object]:
    """Return ``fsdp_config`` of a plan with the user's further keys, on which no step depends."""
    given = config.values.get(FSDP) if config.values.get("fsdp") else started.document.get(FSDP)
    wanted = mapping(plan.args.get(FSDP))
    further = {name: value for name, value in fsdp_named(mapping(given)).items() if name not in (*_SEARCHED, *_FILLED)}
    return {**further, **wanted}


def _without(document: Mapping[str, object], start: str, of_choices: set[str]) -> Mapping[str, object]:
    kept: dict[str, object] = {}
    for name, value in document.items():
        path = f"{start}.{name}"
        if path in of_choices:
            continue
        inside = _without(value, path, of_choices) if isinstance(value, Mapping) else value
        if inside or not value:
            kept[name] = inside
    return kept


def _deepspeed(document: Mapping[str, object], place: str) -> Mapping[str, object]:
    """Return DeepSpeed's document in the spelling of the techniques' choices."""
    if "optimizer" in document:
        why = "DeepSpeed then makes an optimizer of its own, and the trainer's is searched"
        raise _refused(place, "optimizer in DeepSpeed's document", why, "Leave it out: optim chooses the optimizer.")
    zero = dict(mapping(document.get("zero_optimization")))
    if zero.get("stage", 0) not in _STAGES:
        why = "sharding has no such choice"
        raise _refused(place, f"zero_optimization.stage: {zero.get('stage', 0)}", why, "Write 1, 2 or 3.")
    for part in ("offload_optimizer", "offload_param"):
        device = str(mapping(zero.get(part)).get("device") or "none")
        if device not in _OFFLOADED:
            key = f"zero_optimization.{part}.device: {device}"
            raise _refused(place, key, "only the host's memory is probed", "Write cpu or none.")
        if device == "none":
            zero.pop(part, None)
    for name in _COUNTED:
        number = zero.get(name)
        if isinstance(number, float) and number.is_integer():
            zero[name] = int(number)
    return {**document, "zero_optimization": zero}


def _refused(place: str, key: str, why: str, hint: str) -> InputError:
    return InputError(f"{place}: {key} cannot be probed: {why}.", hint=hint)
