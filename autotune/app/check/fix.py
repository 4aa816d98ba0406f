"""Rewrites the keys of a configuration file that TRL no longer has; comments and order stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.core.nested import mapping
from autotune.core.verdict import Fixed, Severity
from autotune.emit.files import write_text
from autotune.errors import InputError
from autotune.inspection.legacy import legacy_of
from autotune.inspection.paths import user_path
from autotune.inspection.yaml_edit import Edit, edited, unified_diff
from autotune.inspection.yaml_file import parsed, read_yaml
from autotune.inspection.yaml_secrets import withheld
from autotune.userconfig.problems import finding
from autotune.userconfig.written import written


def fix_legacy(config: str | Path, *, trainer: str | None = None, output: str | Path | None = None) -> Fixed:
    """Write a configuration file of TRL's with the keys that TRL has now.

    Args:
        output: file to write; None: the file itself.

    Raises:
        InputError: the file cannot be read or written, or does not determine its trainer.
    """
    text = written(str(config), trainer)
    file = text.file
    assert file is not None
    # What is written is the user's own file, with all that is in it.
    own = read_yaml(file.path)
    edits: list[Edit] = []
    left = []
    for key, value in file.values.items():
        old = legacy_of(text.trainer, key, value)
        if old is None:
            continue
        clash = next((name for name in old.write or () if name in file.values and name != key), None)
        if old.write is not None and clash is None:
            replaced = legacy_of(text.trainer, key, own.values[key])
            edits.append(_apart(Edit((key,), replaced.write if replaced is not None else old.write), edits))
        elif old.write is not None or old.by_hand:
            why = f" The file has {clash} already." if clash is not None else ""
            left.append(finding(text, Severity.SILENT, key, f"{old.sentence()}{why}"))
        elif not old.accepted or old.no_effect:
            edits.append(Edit((key,), None))
    after = edited(own, edits)
    if after == own.text:
        return Fixed(str(file.path), "", tuple(left))
    place = user_path(output) if output is not None else file.path
    if place.is_dir():
        raise InputError(f"{place} is a directory.", hint="Give the name of a file with --output.")
    write_text(place, after)
    diff = unified_diff(file.text, withheld(parsed(after, file.path)).text, str(file.path))
    return Fixed(str(place), diff, tuple(left))


def _apart(edit: Edit, others: list[Edit]) -> Edit:
    """Return an edit without those mappings that another edit writes too, which becomes the place of both."""
    kept = dict(edit.write or {})
    for index, other in enumerate(others):
        both = {key for key in kept if isinstance(kept[key], Mapping) and key in (other.write or {})}
        merged = {key: {**mapping((other.write or {})[key]), **mapping(kept.pop(key))} for key in both}
        others[index] = Edit(other.path, {**(other.write or {}), **merged}) if merged else other
    return Edit(edit.path, kept or None)
