"""Replaces removed keys of a TRL configuration file (``--fix-legacy``); comments and order stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.core.documents.verdict import Fixed, Severity
from autotune.core.files.nested import mapping
from autotune.emit.files import check_file, write_text
from autotune.inspection.legacy import legacy_of
from autotune.inspection.paths import user_path
from autotune.inspection.yaml_edit import Edit, apply_edits, unified_diff
from autotune.inspection.yaml_file import parse_yaml, read_yaml
from autotune.inspection.yaml_secrets import mask_secrets
from autotune.userconfig.problems import finding
from autotune.userconfig.written import read_written


def fix_legacy(config: str | Path, *, trainer: str | None = None, output: str | Path | None = None) -> Fixed:
    """Write a TRL configuration file with its removed keys replaced.

    Args:
        output: file to write; None: the file itself.

    Raises:
        InputError: the file cannot be read or written, or does not determine its trainer.
    """
    if output is not None:
        check_file(user_path(output), "--output")
    text = read_written(str(config), trainer)
    file = text.file
    assert file is not None
    # The written file keeps its secrets, which are masked in `file`.
    unmasked = read_yaml(file.path)
    edits: dict[str, dict[str, object]] = {}
    left = []
    for key, value in file.values.items():
        old = legacy_of(text.trainer, key, value)
        if old is None:
            continue
        clash = next((name for name in old.write or () if name in file.values and name != key), None)
        if old.write is not None and clash is None:
            write = dict((legacy_of(text.trainer, key, unmasked.values[key]) or old).write or {})
            for other in edits.values():
                # If two keys become one mapping, it replaces the first.
                for name in [name for name in write if name in other and isinstance(write[name], Mapping)]:
                    other[name] = {**mapping(other[name]), **mapping(write.pop(name))}
            edits[key] = write
        elif old.write is not None or old.by_hand:
            why = f" The file has {clash} already." if clash is not None else ""
            # What the installed release accepts still works as it is.
            works = old.accepted and not old.no_effect and clash is None
            severity = Severity.NOTE if works else Severity.SILENT
            left.append(finding(text, severity, key, f"{old.sentence()}{why}"))
        elif not old.accepted or old.no_effect:
            edits[key] = {}
    after = apply_edits(unmasked, [Edit((key,), write) for key, write in edits.items()])
    if after == unmasked.text:
        return Fixed(str(file.path), "", tuple(left))
    target = user_path(output) if output is not None else file.path
    write_text(target, after)
    diff = unified_diff(file.text, mask_secrets(parse_yaml(after, file.path)).text, str(file.path), str(target))
    return Fixed(str(target), diff, tuple(left))
