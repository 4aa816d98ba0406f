"""Divides a user's configuration (``--base``) into choices to search, choices to hold, and entries of every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.app.options import Options
from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.setting import Base, Setting
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.techniques import find
from autotune.techniques.base import Effect, Technique, impossible, option_of
from autotune.techniques.context_parallel import NAME as CONTEXT_PARALLEL
from autotune.techniques.max_length import least_coverage
from autotune.techniques.sharding import Sharding
from autotune.techniques.traits import MEASURED_FIELDS
from autotune.trainers.base import Trainer
from autotune.trainers.length_limit import limits_rows
from autotune.units import plural
from autotune.userconfig.base import UserBase, documents_of, written_keys
from autotune.userconfig.candidate import NearestCandidate, as_candidate, setting_of
from autotune.userconfig.fields import as_json, traced_fields
from autotune.userconfig.keys import configures_engine, sizes_process_group

_LENGTH, _ROWS = "max_length", "per_device_train_batch_size"
# Techniques whose value must be one of their choices, since other techniques' rules and the packing self-test use it.
_NEEDS_KNOWN_CHOICE = frozenset({"attention"})


@dataclass(frozen=True)
class Start:
    """The properties of a search that follow from a base.

    Attributes:
        batch: documents per optimizer step: the user's ``--global-batch-size``, else the base's.
        token_coverage: least share of tokens, 0 to 1, that every candidate keeps.
    """

    base: Base
    batch: int
    token_coverage: float


def start_of(base: UserBase, options: Options, workload: Workload, machine: Machine) -> Start:
    """Return the start of a search with a base.

    Raises:
        InputError: the base sets a technique to an unsupported value, or shards by FSDP on a single process, which
            transformers refuses (transformers 5.23, ``Trainer.__init__``).
    """
    is_fixed = Sharding.name in options.fixed
    if base.plan.args.get("fsdp") and machine.hardware.processes == 1 and not is_fixed:
        raise InputError(
            f"{base.name} shards by FSDP, and one process has nothing to shard.",
            hint="Give --num-processes, --fix sharding=ddp, or a file without FSDP.",
        )
    trainer = options.trainer
    plan = trainer.as_read(replace(base.plan, launch=machine.hardware.launch), base.arguments)
    plan = trainer.completed(plan, workload)
    has_limit = plan.args.get(_LENGTH) is not None
    plan = _with_length(plan, trainer, workload)
    documents = _documents(base, plan, trainer, workload)
    offloads = "deepspeed" in plan.args
    setting = replace(setting_of(plan, trainer, workload, machine, documents), last_resorts=offloads)
    nearest = _with_defaults(base, as_candidate(plan, trainer, setting, options.file), trainer, setting)
    batch = options.global_batch_size or documents
    custom = frozenset(_custom(base, plan, nearest, trainer, setting)) - options.fixed.keys()
    _check_known(base, custom, trainer)
    unsearched = dict(_unsearched(base, nearest, custom, options, setting))
    choices = {name: choice for name, choice in nearest.candidate.items() if name not in options.fixed}
    if _ROWS in choices:
        here = replace(setting, global_batch_size=batch, allowed=options.allowed)
        candidate = nearest.candidate
        if CONTEXT_PARALLEL in options.fixed:
            here = replace(here, ranks_per_row=options.ranks_per_row)
            candidate = candidate.but(**{CONTEXT_PARALLEL: here.ranks_per_row})
        choices[_ROWS] = _rows(trainer, candidate, here)
    coverage = options.token_coverage
    if not options.coverage_asked and _LENGTH not in options.allowed:
        coverage = least_coverage(nearest.candidate, setting)
    return Start(
        Base(
            base.name,
            choices,
            unsearched,
            tuple(sorted(custom)),
            dict(_entries(base, plan, custom, trainer)),
            documents_of(plan, (item for item in trainer.techniques if item.name not in custom)),
            has_limit,
        ),
        batch,
        coverage,
    )


def _documents(base: UserBase, plan: TrainingPlan, trainer: Trainer, workload: Workload) -> int:
    """Return the documents of an optimizer step of a base, over its own number of processes.

    Raises:
        InputError: the number of processes differs from the base's and does not divide the documents.
    """
    here = plan.launch.processes
    processes = base.launching.processes if base.launching.sets_processes else here
    found = trainer.geometry(replace(plan, launch=Launch(processes)), workload.dataset.documents).documents
    if processes == here:
        # The mean number of documents in packed rows may be fractional.
        return max(1, round(found / plan.data_ranks)) * plan.data_ranks
    documents = max(1, round(found))
    if documents % plan.data_ranks:
        raise InputError(
            f"A step of {base.name} has {plural(documents, trainer.document_noun.removesuffix('s'))}, which"
            f" {here} processes cannot divide equally.",
            hint="Give another --num-processes, or a --global-batch-size that is a multiple of it.",
        )
    return documents


def _with_length(plan: TrainingPlan, trainer: Trainer, workload: Workload) -> TrainingPlan:
    """Return a plan that cuts no rows with the choice of the longest row's length; training stays the same."""
    if not limits_rows(trainer):
        return plan
    length = plan.args.get(_LENGTH)
    if workload.has_images and length in (None, workload.longest):
        # With images, that choice is written as no length.
        return replace(plan, args={**plan.args, _LENGTH: None})
    if length is not None or plan.args.get("padding_free"):
        return plan
    return replace(plan, args={**plan.args, _LENGTH: workload.longest})


def _with_defaults(base: UserBase, nearest: NearestCandidate, trainer: Trainer, setting: Setting) -> NearestCandidate:
    """Return a base as a candidate, with TRL's default for every technique that the file does not set."""
    unset = [item for item in trainer.techniques if item.name not in nearest.exact and not _is_written(base, item)]
    defaults = {item.name: item.default(setting) for item in unset}
    return NearestCandidate(nearest.candidate.but(**defaults), nearest.exact | defaults.keys())


def _is_written(base: UserBase, technique: Technique) -> bool:
    """Whether the file has a key of a technique, under any of its names."""
    return any(base.at(key) for path in technique.writes for key in base.keys(path)) or any(
        base.plan.entry(path) is not None for path in technique.writes if configures_engine(path)
    )


def _custom(
    base: UserBase, plan: TrainingPlan, nearest: NearestCandidate, trainer: Trainer, setting: Setting
) -> Iterator[str]:
    """Yield the techniques whose plan entries match none of their choices."""
    for technique in trainer.techniques:
        if not technique.matters(setting):
            continue
        entries = technique.plan(nearest.candidate[technique.name], nearest.candidate, setting)
        works = any(value not in (None, False) for value in entries.values())
        further = (path for path in technique.writes - entries.keys() if works and _is_set(base, path))
        if technique.name not in nearest.exact or any(plan.entry(path) is not None for path in further):
            yield technique.name


def _is_set(base: UserBase, path: str) -> bool:
    """Whether the file sets the field of a path such as ``args.FIELD`` to another value than the default."""
    head, _, name = path.partition(".")
    values = base.config.values if head == "args" else base.model.values
    written = any(base.at(key) for key in base.keys(path))
    return written and name in values and values[name] != base.defaults[name]


def _check_known(base: UserBase, custom: frozenset[str], trainer: Trainer) -> None:
    for technique in trainer.techniques:
        sizes = technique.impact.sets_sizes or any(map(sizes_process_group, technique.writes))
        if technique.name in custom and (sizes or technique.name in _NEEDS_KNOWN_CHOICE):
            raise InputError(
                f"{base.name}: {_as_written(base, technique)} is not a supported choice of {technique.name}.",
                hint=f"`autotune techniques` lists the choices; --fix {technique.name}=CHOICE replaces the value.",
            )


def _unsearched(
    base: UserBase, nearest: NearestCandidate, custom: frozenset[str], options: Options, setting: Setting
) -> Iterator[tuple[str, str]]:
    """Yield the techniques that keep the user's choice, with the reason."""
    candidate = nearest.candidate
    for technique in options.trainer.techniques:
        name = technique.name
        if name in options.fixed or not technique.matters(setting):
            continue
        value = _as_written(base, technique)
        if name in custom:
            yield name, f"{base.name} has {value}, which is not a known choice and stays"
        elif name in options.allowed:
            continue
        elif not _is_replaceable(technique, candidate, setting):
            yield name, f"{base.name} has {value}, and another choice would change training (--allow {name})"
        # Uncut padding-free rows have the longest row as their maximum length.
        elif name == _LENGTH and not options.coverage_asked and int(candidate[_LENGTH]) < setting.workload.longest:
            yield name, f"{base.name} cuts rows by {value}, and another length would keep other tokens (--allow {name})"


def _is_replaceable(technique: Technique, candidate: Candidate, setting: Setting) -> bool:
    """Whether another exact choice may replace the user's own."""
    choice = candidate[technique.name]
    option = option_of(technique, choice)
    exact = technique.effect(choice, candidate, setting) is Effect.EXACT
    return exact and (option is None or option.replaceable)


def _rows(trainer: Trainer, candidate: Candidate, setting: Setting) -> Choice:
    """Return the base's rows of a micro-batch, or the default if they do not divide the global batch."""
    technique, choice = find(_ROWS, trainer.techniques), candidate[_ROWS]
    refused = impossible(technique, choice, setting) or technique.conflict(choice, candidate, setting)
    return technique.default(setting) if refused else choice


def _entries(
    base: UserBase, plan: TrainingPlan, custom: frozenset[str], trainer: Trainer
) -> Iterator[tuple[str, object]]:
    """Yield the file's plan entries that change a step and are not part of a technique's choice."""
    chosen = {path for item in trainer.techniques if item.name not in custom for path in item.writes}
    for name in sorted(traced_fields(trainer) | MEASURED_FIELDS):
        # A field set to None is included, since its default may be another value.
        if f"args.{name}" not in chosen and _is_set(base, f"args.{name}"):
            yield f"args.{name}", as_json(name, base.config.values[name])
    for part, values in (("model", plan.model), ("env", plan.env)):
        for name, value in values.items():
            if f"{part}.{name}" not in chosen and value not in (None, False):
                yield f"{part}.{name}", value


def _as_written(base: UserBase, technique: Technique) -> str:
    """Return a technique's keys and values in the file, as text; without any, "TRL's default of …"."""
    keys = written_keys(base, technique)
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in keys.items()}
    return ", ".join(f"{name}: {value}" for name, value in values.items()) or f"TRL's default of {technique.name}"
