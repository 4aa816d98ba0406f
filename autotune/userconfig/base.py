"""Reads the user's own configuration for ``--base``, and refuses settings that probes or bundles do not support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.configuration import DISPATCHING, MODEL_CONFIG, TRACKERS, Configuration, ReadCommand
from autotune.core.documents.verdict import Finding, Severity, has_error
from autotune.core.files.nested import Key, lookup, mapping
from autotune.core.machine import Hardware
from autotune.core.plan import Launch, TrainingPlan
from autotune.errors import InputError, UnreadError
from autotune.inspection.yaml_file import YamlFile
from autotune.probing import JobServer
from autotune.techniques.base import Technique
from autotune.techniques.offload import offload_variables
from autotune.techniques.sharding import ZERO_STAGES
from autotune.trainers import find_trainer
from autotune.units import plural
from autotune.userconfig.deepspeed import AUTO, DEVICES, ON_DEVICE, offload_device
from autotune.userconfig.engine import FIELD, as_launched, check_choices, engine_args, without_engine
from autotune.userconfig.fields import fields_of_kind
from autotune.userconfig.fsdp import launched_fsdp, own_fsdp
from autotune.userconfig.keys import configures_engine, engine_key, keys_of
from autotune.userconfig.launch import Launching, launching
from autotune.userconfig.problems import problems
from autotune.userconfig.reading import plan_of, read_command
from autotune.userconfig.sources import Sources, named_rewards, sources
from autotune.userconfig.written import WrittenConfig

DEEPSPEED, FSDP = "deepspeed", "fsdp_config"
"""The arguments of a plan with documents of engines."""
_COUNTED = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
_SEARCHED = ("version", "reshard_after_forward", "cpu_offload")
# Keys that transformers fills in and only TPUs read (transformers/training_args.py, `_process_fsdp_args`).
_FILLED = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
_INSTEAD = "Give MODEL and DATASET in addition to --base."


@dataclass(frozen=True)
class UserBase:
    """The user's own configuration, as TRL's parser reads it.

    Attributes:
        config: the values of the trainer's class.
        plan: its training plan, with every field that affects a step, including those at their defaults.
        launching: the launch of its processes.
        assumptions: values that the file does not determine, in sentences.
    """

    written: WrittenConfig
    read: ReadCommand
    config: Configuration
    plan: TrainingPlan
    launching: Launching
    assumptions: tuple[str, ...] = ()

    @property
    def file(self) -> YamlFile:
        """The file."""
        assert self.written.file is not None
        return self.written.file

    @property
    def name(self) -> str:
        """The file, as the user named it."""
        return self.written.place

    @property
    def model(self) -> Configuration:
        """The values of ``trl.ModelConfig``."""
        return self.read.configurations[MODEL_CONFIG]

    @property
    def defaults(self) -> Mapping[str, object]:
        """Defaults of TRL's classes for keys that are not in the file."""
        return {name: value for item in self.read.configurations.values() for name, value in item.defaults.items()}

    def keys(self, path: str) -> tuple[Key, ...]:
        """Return the keys in the file for the entry at a path of a plan; empty for an engine's entry."""
        return () if configures_engine(path) else keys_of(self.file.values, path)

    def at(self, key: Key) -> tuple[object, ...]:
        """Return a tuple of the key's value in the file, or an empty tuple if the key is absent."""
        return lookup(self.file.values, key)

    @property
    def arguments(self) -> Mapping[str, object]:
        """The keys of the file that belong to TRL's classes, as written, without those of the launch."""
        return {name: value for name, value in self.file.values.items() if name in self.defaults}


def read_base(written: WrittenConfig, hardware: Hardware, server: JobServer, folder: Path) -> UserBase:
    """Return a base, read by TRL's parser for a device.

    Raises:
        InputError: the message names all wrong keys at once, or a setting that probes do not support.
    """
    there = on_device(written, hardware)
    return base_from(there, read_command(there, hardware, server, folder))


def on_device(written: WrittenConfig, hardware: Hardware) -> WrittenConfig:
    """Return the base's command for a device: on a CPU, TRL refuses most files unless they set ``use_cpu``."""
    args = find_trainer(written.trainer).cpu_args if hardware.kind == "cpu" else {}
    added = [word for name, value in args.items() if name not in written.values for word in (f"--{name}", str(value))]
    command = written.command
    return replace(written, command=replace(command, words=(*command.words, *added)))


def base_from(written: WrittenConfig, read: ReadCommand) -> UserBase:
    """Return a base from its command as read by TRL's parser.

    Raises:
        InputError: as in :func:`read_base`.
    """
    # Probes report to no experiment tracker.
    absent = {name: message for name, message in read.absent.items() if name != TRACKERS}
    found, trainer = problems(written, replace(read, absent=absent)), find_trainer(written.trainer)
    config = read.configurations.get(trainer.config_class)
    if has_error(found):
        raise _wrong(written, found)
    started = launching(written, read)
    assert config is not None
    try:
        user = plan_of(written, read, without_engine(config))
    except UnreadError as error:
        raise InputError(f"{written.place}: {error.message}", hint="Leave it out of the file.") from error
    try:
        # Variables of this shell need not be those of the training.
        check_choices(written.env, started.document, config)
        plan = _with_engine(user.plan, started, config, written.env)
    except InputError as error:
        raise InputError(f"{written.place}: {error.message}", hint=error.hint) from error
    return UserBase(written, read, config, plan, started, user.assumptions)


def sources_of(base: UserBase, model: str | Path | None, dataset: str | Path | None) -> Sources:
    """Return the model and the rows of a base, or their replacements.

    Raises:
        InputError: one of them is missing or cannot be used.
    """
    try:
        found = sources(base.read, base.config, model, dataset)
    except UnreadError as error:
        raise InputError(f"{base.name}: {error.message}", hint=_INSTEAD) from error
    if found.dataset.mixture or found.streams:
        what = "Streamed rows are" if found.streams else f"A mixture of datasets ({found.dataset.name}) is"
        raise InputError(f"{base.name}: {what} not supported by a search.", hint=_INSTEAD)
    return found


def rewards_of(base: UserBase) -> tuple[str, ...]:
    """Return the reward functions of a base.

    Raises:
        InputError: it names a reward model.
    """
    if not find_trainer(base.written.trainer).scores:
        return ()
    try:
        return named_rewards(base.read)
    except UnreadError as error:
        hint = "Leave it out of the file, and name reward functions of the same cost with --reward-funcs."
        raise InputError(f"{base.name}: {error.message}", hint=hint) from error


def _wrong(written: WrittenConfig, found: Iterable[Finding]) -> InputError:
    lines = [_line(item) for item in found if item.severity is Severity.ERROR]
    things = plural(len(lines), "thing is wrong", "things are wrong")
    check = f"autotune check {written.place} --trainer {written.trainer}"
    return InputError(
        "\n  ".join([f"{written.place} cannot be a base: {things}.", *lines]),
        hint=f"`{check} --no-fit` has the details; with --fix-legacy instead, it rewrites old keys.",
    )


def _line(item: Finding) -> str:
    return item.message if item.line is None else f"line {item.line}: {item.message}"


def written_keys(base: UserBase, technique: Technique) -> Mapping[str, object]:
    """Return the keys of the file that a technique writes, with their values."""
    keys = [key for path in sorted(technique.writes) for key in base.keys(path)]
    found = {key[-1]: value for key in dict.fromkeys(keys) for value in base.at(key)}
    return found | {
        engine_key(path): value
        for path in sorted(technique.identified_by or technique.writes)
        if configures_engine(path) and (value := base.plan.entry(path)) is not None
    }


def _with_engine(
    plan: TrainingPlan, started: Launching, config: Configuration, variables: Mapping[str, str]
) -> TrainingPlan:
    """Return the plan of a base with its sharding and its number of processes.

    Sizes and precision in DeepSpeed's document become ``auto``, since they follow from the trainer's arguments.

    Args:
        variables: the environment variables of the file.

    Raises:
        InputError: the file has a setting that probes do not support.
    """
    if started.machines > 1:
        raise _refused(f"num_machines: {started.machines}", "probes run on one machine", "Write 1.")
    if config.dispatches:
        why = "each process of a probe reads its own micro-batches"
        raise _refused(": ".join((*DISPATCHING, "true")), why, "Leave it out.")
    if started.flags:
        where = "Name a file with accelerate_config, or write deepspeed or fsdp with fsdp_config."
        raise _refused(started.flags[0], "an engine is read from a file, not from accelerate's arguments", where)
    # A file for one process may be searched with several.
    processes = started.processes if started.sets_processes and started.processes > 1 else None
    overruled = as_launched(config, started) is not config
    # In all written files, gradient accumulation follows from the trainer's arguments.
    found = dict(engine_args(started.document, config, processes, variables=variables, accumulation=AUTO))
    if overruled:
        why = "bf16 and fp16 are false, but accelerate overrides them"
        raise _refused(f"mixed_precision: {started.precision}", why, f"Write {started.precision}: true.")
    groups = dict(mapping(found.pop(FIELD, None)))
    if "cp_comm_strategy" in groups:
        why = "context parallelism is searched with accelerate's default"
        raise _refused(f"cp_comm_strategy: {groups['cp_comm_strategy']}", why, "Leave it out.")
    # Sharding among all processes is FSDP2's default.
    if groups != {"dp_shard_size": started.processes} and groups:
        found[FIELD] = groups
    if DEEPSPEED in found:
        found[DEEPSPEED] = _deepspeed(mapping(found[DEEPSPEED]))
    if mapping(found.get(FSDP)).get("activation_checkpointing"):
        instead = "Write gradient_checkpointing: true instead."
        raise _refused("fsdp_activation_checkpointing", "checkpointing is searched by TRL's own key", instead)
    env = {**plan.env, **offload_variables(found)}
    return replace(plan, args={**plan.args, **found}, launch=Launch(started.processes), env=env)


def documents_of(plan: TrainingPlan, techniques: Iterable[Technique]) -> dict[str, Mapping[str, object]]:
    """Return a base's engine documents without the entries of techniques, by path in a plan."""
    of_choices = {path for technique in techniques for path in technique.identified_by or technique.writes}
    return {
        f"args.{name}": _without(mapping(plan.args[name]), f"args.{name}", of_choices)
        for name in (DEEPSPEED, FSDP)
        if name in plan.args
    }


def fsdp_keys(started: Launching, config: Configuration, plan: TrainingPlan) -> Mapping[str, object]:
    """Return ``fsdp_config`` of a plan with the user's further keys, which do not affect a step."""
    given = own_fsdp(config)
    if not config.values.get("fsdp"):
        read = fields_of_kind("fsdp", "read")
        given = {name: value for name, value in launched_fsdp(started.document).items() if name in read}
    wanted = mapping(plan.args.get(FSDP))
    further = {name: value for name, value in given.items() if name not in (*_SEARCHED, *_FILLED)}
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


def _deepspeed(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return DeepSpeed's document in the spelling of the techniques' choices."""
    if "optimizer" in document:
        why = "it replaces the trainer's optimizer, which is searched"
        raise _refused("optimizer in DeepSpeed's document", why, "Leave it out: optim chooses the optimizer.")
    zero = dict(mapping(document.get("zero_optimization")))
    if zero.get("stage", 0) not in ZERO_STAGES.values():
        why = "only the stages 1, 2 and 3 shard"
        raise _refused(f"zero_optimization.stage: {zero.get('stage', 0)}", why, "Write 1, 2 or 3.")
    for part in DEVICES:
        if offload_device(document, part) in ON_DEVICE:
            zero.pop(part, None)
    for name in _COUNTED:
        number = zero.get(name)
        if isinstance(number, float) and number.is_integer():
            zero[name] = int(number)
    return {**document, "zero_optimization": zero}


def _refused(key: str, why: str, hint: str) -> InputError:
    return InputError(f"{key} cannot be probed: {why}.", hint=hint)
