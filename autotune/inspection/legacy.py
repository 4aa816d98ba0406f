"""Looks up keys and values of TRL configurations that are removed, deprecated or invalid, with their replacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from autotune.core.files.yaml_text import yaml_line

SHARED = ("model", "script", "transformers", "any")
"""Sections of the table that apply to every trainer, after its own."""
_VALUE = "<value>"
_EMPTY: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Legacy:
    """The status of a key, or of one value of a key: removed, deprecated or without effect.

    There are three remedies: a replacement (``write``), a decision by the user (``by_hand``), or removing the key.

    Attributes:
        key: the key.
        library: ``TRL`` or ``transformers``; ``gone`` and ``since`` are releases of it.
        value: the user's value.
        of_value: whether only this value is affected; other values of the key are legal.
        same: whether the value is the default, so that the key can be removed without effect.
        gone: the first release without the key, or without the value.
        since: the release from which on the key is deprecated or has no effect; the library still accepts it.
        no_effect: whether an accepted key has no effect.
        never: whether no release has had the key, for this trainer or for any.
        of_trainer: whether the entry is about one trainer.
        write: equivalent keys and values of today, with the user's value filled in; None if there are none.
        by_hand: whether the user has to choose the replacement.
        note: sentences on the choice, or an empty string.
    """

    key: str
    library: str
    value: object
    of_value: bool
    same: bool
    gone: str | None = None
    since: str | None = None
    no_effect: bool = False
    never: bool = False
    write: Mapping[str, object] | None = None
    by_hand: bool = False
    note: str = ""
    of_trainer: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the installed library still accepts the key."""
        return self.since is not None

    def sentence(self) -> str:
        """Return the status and the remedy, such as ``a was removed in TRL 0.20.0: write b: 1.``."""
        what = f"{self.key}: {yaml_line(self.value)}" if self.of_value else self.key
        return f"{self._became(what)}{self._advice()}{f' {self.note}' if self.note else ''}"

    def _became(self, what: str) -> str:
        if self.never:
            where = " for this trainer" if self.of_trainer else ""
            return f"No release of {self.library} has had {what}{where}"
        if self.gone is not None:
            return f"{what} was removed in {self.library} {self.gone}"
        if self.no_effect:
            return f"{what} has no effect since {self.library} {self.since}"
        return f"{what} is deprecated since {self.library} {self.since}"

    def _advice(self) -> str:
        if self.same:
            return f": leave it out, which has the same effect as {yaml_line(self.value)}."
        if self.write:
            return f": write {', '.join(f'{key}: {yaml_line(value)}' for key, value in self.write.items())}."
        if self.by_hand:
            return "."
        return ": leave it out." if self.accepted or self.never else " without a replacement: leave it out."


def legacy_of(trainer: str, key: str, value: object) -> Legacy | None:
    """Return the table's entry for a key with a value, or None without one.

    Args:
        trainer: the trainer's name; without a section of that name, only :data:`SHARED` applies.
        key: a top-level key of a configuration.
        value: its value, as YAML loads it; an entry may be about one item of a list.
    """
    for section in (trainer, *SHARED):
        row = table().get(section, _EMPTY).get(key)
        if row is None:
            continue
        library = "transformers" if section == "transformers" else "TRL"
        entry = _for_value(key, value, row, library) or (_entry(key, value, row, library) if _any_value(row) else None)
        if entry is not None:
            return replace(entry, of_trainer=section not in SHARED)
    return None


@cache
def table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the table by section and key; the head of ``legacy.yaml`` describes the entries."""
    text = files("autotune.inspection").joinpath("legacy.yaml").read_text(encoding="utf-8")
    sections = yaml.safe_load(text)
    return {section: rows or {} for section, rows in sections.items()}


def _any_value(row: Mapping[str, Any]) -> bool:
    """Return whether a row applies to its key with any value."""
    return bool({"gone", "since", "never"} & row.keys())


def _for_value(key: str, value: object, row: Mapping[str, Any], library: str) -> Legacy | None:
    of_value = not _any_value(row)
    for legacy_value, more in row.get("values", _EMPTY).items():
        merged = {**row, **more}
        if _equal(value, legacy_value):
            return _entry(key, value, merged, library, of_value=of_value)
        if isinstance(value, list) and any(_equal(item, legacy_value) for item in value):
            found = _entry(key, legacy_value, merged, library, of_value=of_value)
            return _for_list(found, value, legacy_value)
    return None


def _for_list(found: Legacy, values: Sequence[object], legacy_value: object) -> Legacy:
    """Return the entry for a whole list, given that for one of its items."""
    new = (found.write or {}).get(found.key)
    if new is None:
        return found
    return replace(found, write={found.key: [new if _equal(item, legacy_value) else item for item in values]})


def _entry(key: str, value: object, row: Mapping[str, Any], library: str, *, of_value: bool = False) -> Legacy:
    same = any(_equal(value, other) for other in row.get("same", ()))
    without = {"same", "values", *(("write", "by_hand", "note") if same else ())}
    facts = {name: fact for name, fact in row.items() if name not in without}
    if "write" in facts:
        facts["write"] = _fill_value(facts["write"], value)
    return Legacy(key, library, value, of_value, same, **facts)


def _fill_value(template: Any, value: object) -> Any:
    """Return the replacement with the user's value filled in."""
    if isinstance(template, Mapping):
        return {key: _fill_value(inner, value) for key, inner in template.items()}
    if isinstance(template, list):
        return [_fill_value(inner, value) for inner in template]
    return value if template == _VALUE else template


def _equal(one: object, other: object) -> bool:
    """Return whether two values are equal; True does not equal 1."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other
