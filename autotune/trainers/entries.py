"""Puts entries into a training plan: those of a technique's choice, and the user's own engine document."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate
from autotune.core.nested import at
from autotune.core.setting import Setting
from autotune.techniques.base import Technique


def entries_of(technique: Technique, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
    """Return the plan entries of a technique in a candidate.

    Where the user's own document has the choice, what the document leaves out stays out.
    """
    choice, base = candidate[technique.name], setting.base
    entries = technique.plan(choice, candidate, setting)
    if base is None or not technique.identified_by or base.choices.get(technique.name) != choice:
        return entries
    own = tuple(f"{path}." for path in base.documents)
    return {
        path: value for path, value in entries.items() if path in technique.identified_by or not path.startswith(own)
    }


def put(tree: dict[str, object], path: str, value: object) -> None:
    """Set the value at a path such as ``args.FIELD`` of nested mappings, which are made where there are none.

    A mapping is put into one that is there already, key by key.
    """
    first, *names = path.split(".")
    for name in reversed(names):
        value = {name: value}
    _update(tree, {first: value})


def complete(tree: dict[str, object], path: str, document: Mapping[str, object]) -> None:
    """Put what a document has in place of what the mapping at a path has; nothing where there is no mapping."""
    for found in at(tree, path.split(".")):
        if isinstance(found, dict):
            _update(found, document)


def _update(into: dict[str, object], document: Mapping[str, object]) -> None:
    for name, value in document.items():
        inside = into.get(name)
        if isinstance(value, Mapping) and isinstance(inside, dict):
            _update(inside, value)
        else:
            into[name] = dict(value) if isinstance(value, Mapping) else value
