"""Edits the file of ``--base`` so that it trains the recommendation, and checks the result by reading it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.confidential import secret_keys, without_secrets
from autotune.core.documents.result import BaseFile
from autotune.core.files.nested import Key
from autotune.core.files.yaml_text import yaml_text
from autotune.core.machine import Hardware
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.emit.arguments import THREADS, thread_variables
from autotune.emit.files import write_text
from autotune.emit.launch import ACCELERATE, FROM_TRAINER_ARGUMENTS, PRECISION, launch_files, launch_keys
from autotune.emit.rows import ROW_ARGUMENTS, TrainingRows
from autotune.errors import InputError
from autotune.inspection.yaml_edit import Edit, apply_edits, edited_values, unified_diff
from autotune.probing import JobServer
from autotune.techniques.base import Technique
from autotune.techniques.offload import offload_variables
from autotune.techniques.packing import SHUFFLED
from autotune.techniques.sharding import ENGINE_FIELDS
from autotune.trainers.base import Trainer
from autotune.trainers.declared import LOADING
from autotune.trainers.distillation import TEACHER, TEACHER_REVISION
from autotune.userconfig.base import DEEPSPEED, FSDP, UserBase, fsdp_keys, read_base, written_keys
from autotune.userconfig.fields import as_json, keeps_order
from autotune.userconfig.keys import configures_engine, engine_key
from autotune.userconfig.launch import COUNTS, LAUNCH_FILES
from autotune.userconfig.written import read_written

# Fields that a probe sets itself: evaluation and the placement of layers.
_OF_PROBES = frozenset({"eval_strategy", "model_init_kwargs"})
_LENGTH = "args.max_length"
_THREADS = "num_cpu_threads_per_process"


@dataclass(frozen=True)
class EditTarget:
    """The values that the edited file must have.

    Attributes:
        plan: the recommended plan.
        fixed: techniques that the user fixed instead of the file's values.
        model, teacher: replacements of the file's, or None.
        rows: replacement of the file's rows, or None.
        evaluates: whether the evaluation rows differ from the file's.
        bundle: the bundle's directory, with the launchers' files.
    """

    plan: TrainingPlan
    fixed: frozenset[str] = frozenset()
    model: str | None = None
    teacher: str | None = None
    rows: TrainingRows | None = None
    evaluates: bool = False
    bundle: Path = Path()


def edited_text(base: UserBase, edits: Mapping[Key, object]) -> str:
    """Return the text of the file with the required keys, without secret ones.

    Raises:
        InputError: the file cannot be edited; the message has the reason.
    """
    secret = (path for path in secret_keys(base.file.values) if not any(path[: len(edit)] == edit for edit in edits))
    return apply_edits(base.file, [*_of_values(edits), *(Edit(path) for path in secret)])


def values_after(base: UserBase, edits: Mapping[Key, object]) -> dict[str, Any]:
    """Return the required keys and values of the file, without secret ones."""
    return edited_values(without_secrets(dict(base.file.values)), _of_values(edits))


def _of_values(edits: Mapping[Key, object]) -> list[Edit]:
    return [Edit(path, {path[-1]: value}) for path, value in edits.items()]


def edits_of(base: UserBase, wanted: EditTarget, trainer: Trainer, setting: Setting) -> dict[Key, object]:
    """Return the keys, by their path in the file, whose values for a plan differ from the file's.

    A technique's key in the file that the plan leaves at TRL's default gets that default.
    """
    found = dict(_values(base, wanted, trainer, setting))
    return {path: value for path, value in found.items() if _differs(base, path, value)}


def _values(base: UserBase, wanted: EditTarget, trainer: Trainer, setting: Setting) -> Iterator[tuple[Key, object]]:
    """Yield the required values of keys, by their path in the file, including unchanged ones."""
    named = {"model_name_or_path": wanted.model, TEACHER: wanted.teacher}
    if wanted.teacher is not None and TEACHER_REVISION in wanted.plan.args:
        named[TEACHER_REVISION] = str(wanted.plan.args[TEACHER_REVISION])
    yield from (((name,), value) for name, value in named.items() if value is not None)
    if wanted.model is not None:
        # The file's revision is that of its own model.
        revision = setting.workload.model_source.revision
        yield from ((key, revision) for key in (("model_revision",), (LOADING, "revision")) if base.at(key))
    if wanted.plan.rewards:
        yield ("reward_funcs",), list(wanted.plan.rewards)
    if wanted.rows is not None:
        rows = wanted.rows.arguments()
        # Cut copies are token rows, to which these fields were already applied; TRL refuses some of them for tokens.
        applied = trainer.config_fields.assumed if wanted.rows.cut else ()
        names = (name for name in (*ROW_ARGUMENTS, *applied) if name in base.arguments and name not in rows)
        others = {name: base.defaults[name] for name in names}
        yield from (((name,), value) for name, value in {**others, **rows}.items())
    if wanted.evaluates and not base.config.evaluates_between_steps:
        yield from _entry(base, "args.eval_strategy", wanted.plan)
    changed = _changed(base, wanted, trainer, setting)
    # Rows that are trained in order, such as a curriculum, are packed in order. Only packing needs shuffled rows.
    kept = {f"args.{SHUFFLED}"} if keeps_order(base.config) or not wanted.plan.args.get("packing") else set()
    for path in dict.fromkeys(path for technique in changed for path in sorted(technique.writes - kept)):
        yield from _entry(base, path, wanted.plan)
    searched = {path for technique in trainer.techniques for path in technique.writes}
    device = trainer.cpu_args if setting.machine.hardware.kind == "cpu" else ()
    also = {path for paths in trainer.also_set.values() for path in paths}
    for path in dict.fromkeys((*(f"args.{name}" for name in device), *sorted(also))):
        if path not in searched and wanted.plan.at(path):
            yield from _entry(base, path, wanted.plan)
    file_args = trainer.written_args(wanted.plan, base.arguments)
    for name in sorted(file_args.keys() ^ wanted.plan.args.keys()):
        yield (name,), file_args.get(name, base.defaults[name])
    yield from _launch(base, wanted, setting.machine.hardware)
    yield from _engine(base, wanted.plan, plan_before(trainer, setting))


def _launch(base: UserBase, wanted: EditTarget, hardware: Hardware) -> Iterator[tuple[Key, object]]:
    """Yield the keys that ``trl`` passes to ``accelerate launch``."""
    values = base.file.values
    named = next((name for name in LAUNCH_FILES if values.get(name)), None)
    yield from (((name,), hardware.processes) for name in COUNTS if values.get(name) is not None)
    if named is not None:
        yield (named,), str(wanted.bundle.absolute() / ACCELERATE)
    else:
        new = {"num_processes": hardware.processes} if "num_processes" not in values else {}
        yield from (((name,), value) for name, value in {**new, **launch_keys(wanted.plan, wanted.bundle)}.items())
    # Accelerate's own key for threads has no effect on DeepSpeed's processes.
    if THREADS not in base.written.env and (wanted.plan.args.get(DEEPSPEED) or values.get(_THREADS) is None):
        yield from ((("env", name), value) for name, value in thread_variables(hardware.threads).items())
    if values.get(PRECISION) is not None:
        yield (PRECISION,), FROM_TRAINER_ARGUMENTS


def _engine(base: UserBase, plan: TrainingPlan, before: TrainingPlan) -> Iterator[tuple[Key, object]]:
    """Yield the keys of engines: FSDP by the trainer's fields, DeepSpeed by accelerate's file."""
    values = base.file.values
    if values.get(DEEPSPEED) is not None:
        yield (DEEPSPEED,), None
    if not plan.args.get("fsdp"):
        yield from (((name,), base.defaults.get(name)) for name in ("fsdp", FSDP) if values.get(name) is not None)
    elif not values.get("fsdp") or plan.args.get(FSDP) != before.args.get(FSDP):
        yield ("fsdp",), True
        yield (FSDP,), fsdp_keys(base.launching, base.config, plan)
    yield from ((("env", name), value) for name, value in offload_variables(plan.args).items())


def _changed(base: UserBase, wanted: EditTarget, trainer: Trainer, setting: Setting) -> Iterator[Technique]:
    """Yield the techniques whose entries differ from the base, by their own or another technique's choice."""
    before = plan_before(trainer, setting)
    for technique in trainer.techniques:
        if not technique.matters(setting):
            continue
        if technique.name in wanted.fixed or any(
            before.at(path) != wanted.plan.at(path)
            or before.entry(path) != wanted.plan.entry(path)
            # Accumulation changes with the global batch. A maximum length that cuts no row stays.
            or (path != _LENGTH and base.plan.entry(path) not in (None, wanted.plan.entry(path)))
            for path in technique.writes
            if path.startswith(("args.", "model.", "env."))
        ):
            yield technique


def plan_before(trainer: Trainer, setting: Setting) -> TrainingPlan:
    """Return the plan of the base, with TRL's default for choices that the user fixed."""
    assert setting.base is not None
    candidate = trainer.defaults(setting).but(**setting.base.choices)
    return trainer.plan(trainer.normal(candidate, setting), setting)


def _entry(base: UserBase, path: str, plan: TrainingPlan) -> Iterator[tuple[Key, object]]:
    """Yield the file's keys for an entry: the plan's value, or the default if only the file sets it."""
    present = plan.at(path)
    for key in base.keys(path):
        default = base.defaults.get(key[-1]) if len(key) == 1 else None
        if present:
            yield key, plan.entry(path)
        elif base.at(key):
            # An empty variable counts as unset.
            yield key, "" if path.startswith("env.") else default


def _differs(base: UserBase, key: Key, value: object) -> bool:
    """Whether the value of a key differs from the file's or, without one, from TRL's default."""
    found = base.at(key)
    if not found:
        known = len(key) == 1 and key[0] in base.defaults
        return not (known and base.defaults[key[0]] == value)
    read = next((item.values[key[0]] for item in base.read.configurations.values() if key[0] in item.values), found[0])
    return bool(found[0] != value and (len(key) > 1 or read != value))


def edited_base(
    base: UserBase, wanted: EditTarget, trainer: Trainer, setting: Setting, server: JobServer, folder: Path
) -> tuple[BaseFile, str]:
    """Return the base edited by the recommendation, and a note; the note is empty if the file could be edited.

    A file that cannot be edited, such as one with merges, is written anew with its values, without its comments.

    Args:
        folder: folder for the configuration that is read again; it need not exist.
    """
    edits, note = edits_of(base, wanted, trainer, setting), ""
    # The launchers' files are in this folder here, and in the bundle later.
    again = edits_of(base, replace(wanted, bundle=folder), trainer, setting)
    try:
        text, here = edited_text(base, edits), edited_text(base, again)
    except InputError as error:
        text, here = (yaml_text(values_after(base, each)) for each in (edits, again))
        note = f"config.yaml has the values of {base.name} without its comments. {error.message}"
    file = folder / "config.yaml"
    for name, content in {file.name: here, **launch_files(wanted.plan, folder, base.launching.document)}.items():
        write_text(folder / name, content)
    read = read_base(read_written(str(file), trainer.name), setting.machine.hardware, server, folder / "read")
    # Entries in which the base's plan differs from the file stay as in the file.
    idle = {path for item in trainer.techniques if not item.matters(setting) for path in item.writes}
    differing = _differing(read, wanted.plan) - _differing(base, plan_before(trainer, setting)) - idle
    other = ", ".join(sorted(path.partition(".")[2] for path in differing))
    if other:
        note = f"{note} With config.yaml, {other} differs from the measured training.".strip()
    found = BaseFile(
        base.name,
        dict(_changed_keys(base, edits, wanted.plan, trainer)),
        text,
        unified_diff(base.file.text, text, base.name),
        {
            name: as_json(name, read.config.values[name])
            for name, value in read.arguments.items()
            if _sets_field(read, name, value)
        },
        {name: value for name, value in read.arguments.items() if name not in read.config.values},
        dict(read.written.env),
        base.launching.document,
        tuple(".".join(path) for path in secret_keys(base.file.values)),
    )
    return found, note


def _sets_field(read: UserBase, name: str, value: object) -> bool:
    """Whether a key sets a field of the trainer; TRL's class may fill in a field whose value is empty, the default."""
    return name in read.config.values and not (value is None is read.config.defaults[name])


def _changed_keys(
    base: UserBase, edits: Mapping[Key, object], plan: TrainingPlan, trainer: Trainer
) -> Iterator[tuple[str, Mapping[str, object]]]:
    names = {path[-1] for path in edits}
    for technique in trainer.techniques:
        engine = (path for path in technique.writes if configures_engine(path))
        other = {engine_key(path) for path in engine if base.plan.entry(path) != plan.entry(path)}
        keys = {name: value for name, value in written_keys(base, technique).items() if name in names | other}
        if keys:
            yield technique.name, keys


def _differing(read: UserBase, plan: TrainingPlan) -> frozenset[str]:
    """Return the paths, such as ``args.FIELD``, of entries that differ between a configuration and a plan."""
    engines = {name: read.plan.args.get(name) for name in ENGINE_FIELDS}
    differing = [
        f"{part}.{name}"
        for part, values in (("args", {**read.config.values, **engines}), ("model", read.model.values))
        for name, value in getattr(plan, part).items()
        if name not in _OF_PROBES and not _equivalent(value, values.get(name))
    ]
    differing += [f"env.{name}" for name, value in plan.env.items() if read.plan.entry(f"env.{name}") != value]
    return frozenset(differing)


def _equivalent(value: object, read: object) -> bool:
    if isinstance(value, Mapping) and isinstance(read, Mapping):
        # TRL adds keys to `gradient_checkpointing_kwargs`.
        return all(read.get(name) == item for name, item in value.items())
    return value == read or (read is None and value in (False, None, {})) or [value] == read
