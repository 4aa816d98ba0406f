"""A short ``repr`` for the results of the public functions, which shells and notebooks show."""

from __future__ import annotations

from dataclasses import fields

_LONGEST = 800
"""Most characters of a field's value: a configuration's choices are shown, tables and lists of trials are not."""


class Brief:
    """Base of a dataclass with ``repr=False``: its ``repr`` leaves out long fields, and ends with their names."""

    def __repr__(self) -> str:
        texts = {item.name: repr(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]
        shown = [f"{name}={text}" for name, text in texts.items() if len(text) <= _LONGEST]
        hidden = [name for name, text in texts.items() if len(text) > _LONGEST]
        more = [f"further: {', '.join(hidden)}"] if hidden else []
        return f"{type(self).__name__}({', '.join([*shown, *more])})"
