"""Builds the body of ``config.yaml`` from the file of a base, and reads it again to check that it has the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from autotune.confidential import secret_keys
from autotune.core.nested import Key
from autotune.core.plan import TrainingPlan
from autotune.core.result import BaseFile
from autotune.core.setting import Setting
from autotune.emit.files import write_text
from autotune.emit.launch import launch_files
from autotune.emit.yaml_text import yaml_text
from autotune.errors import InputError
from autotune.inspection.yaml_edit import unified_diff
from autotune.probing import JobServer
from autotune.techniques.sharding import ENGINE_FIELDS
from autotune.trainers import Trainer
from autotune.userconfig.base import UserBase, read_base, written_keys
from autotune.userconfig.edit import Wanted, edits_of, plan_before, rewritten, values_after
from autotune.userconfig.keys import engine_key, of_engine
from autotune.userconfig.written import written

# A probe sets evaluation and the placement of layers itself.
_OF_PROBES = frozenset({"eval_strategy", "model_init_kwargs"})


def handed_over(
    base: UserBase, wanted: Wanted, trainer: Trainer, setting: Setting, server: JobServer, folder: Path
) -> tuple[BaseFile, str]:
    """Return the base with the recommendation's configuration, and a note; empty if the file could be edited.

    A file that cannot be edited, such as one with merges, is written anew with its values, without its comments.

    Args:
        folder: folder to write the configuration to for reading it again; it need not exist.
    """
    edits, note = edits_of(base, wanted, trainer, setting), ""
    # The files that it names are in the bundle later, and next to it here.
    again = edits_of(base, replace(wanted, bundle=folder), trainer, setting)
    try:
        text, here = rewritten(base, edits), rewritten(base, again)
    except InputError as error:
        text, here = (yaml_text(values_after(base, each)) for each in (edits, again))
        note = f"config.yaml has the values of {base.name} without its comments. {error.message}"
    file = folder / "config.yaml"
    for name, content in {file.name: here, **launch_files(wanted.plan, folder, base.launching.document)}.items():
        write_text(folder / name, content)
    read = read_base(written(str(file), trainer.name), setting.machine.hardware, server, folder / "read")
    # Entries in which the base's plan differs from the file stay as in the file.
    idle = {path for item in trainer.techniques if not item.matters(setting) for path in item.writes}
    differing = _other(read, wanted.plan) - _other(base, plan_before(trainer, setting)) - idle
    other = ", ".join(sorted(path.partition(".")[2] for path in differing))
    if other:
        note = f"{note} TRL reads {other} otherwise in config.yaml than it was measured.".strip()
    found = BaseFile(
        base.name,
        dict(_changed_keys(base, edits, wanted.plan, trainer)),
        text,
        unified_diff(base.file.text, text, base.name),
        {name: read.config.values[name] for name in read.arguments if name in read.config.values},
        {name: value for name, value in read.arguments.items() if name not in read.config.values},
        dict(read.written.env),
        base.launching.document,
        tuple(".".join(path) for path in secret_keys(base.file.values)),
    )
    return found, note


def _changed_keys(
    base: UserBase, edits: Mapping[Key, object], plan: TrainingPlan, trainer: Trainer
) -> Iterator[tuple[str, Mapping[str, object]]]:
    edited = {path[-1] for path in edits}
    for technique in trainer.techniques:
        engine = (path for path in technique.writes if of_engine(path))
        other = {engine_key(path) for path in engine if base.plan.entry(path) != plan.entry(path)}
        keys = {name: value for name, value in written_keys(base, technique).items() if name in edited | other}
        if keys:
            yield technique.name, keys


def _other(read: UserBase, plan: TrainingPlan) -> frozenset[str]:
    """Return the paths, such as ``args.FIELD``, of what a configuration has otherwise than a plan."""
    differing = [
        f"{part}.{name}"
        for part, values in (("args", {**read.config.values, **_engines(read)}), ("model", read.model.values))
        for name, value in getattr(plan, part).items()
        if name not in _OF_PROBES and not _agrees(value, values.get(name))
    ]
    differing += [f"env.{name}" for name, value in plan.env.items() if read.plan.entry(f"env.{name}") != value]
    return frozenset(differing)


def _agrees(value: object, read: object) -> bool:
    if isinstance(value, Mapping) and isinstance(read, Mapping):
        # TRL adds keys to those of gradient checkpointing.
        return all(read.get(name) == item for name, item in value.items())
    return value == read or (read is None and value in (False, None, {})) or [value] == read


def _engines(read: UserBase) -> Mapping[str, object]:
    return {name: read.plan.args.get(name) for name in ENGINE_FIELDS}
