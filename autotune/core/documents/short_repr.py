"""A short ``repr`` and text for the results of the public functions, which shells, notebooks and ``print`` show."""

from __future__ import annotations

from dataclasses import fields

_LONGEST, _LONGEST_LINE = 800, 120
"""Most characters of a field's value: a configuration's choices are shown, tables and lists of trials are not."""


class ShortRepr:
    """Base of a dataclass with ``repr=False``: ``repr`` and ``str`` leave out long fields, and end with their names."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._shown('=', _LONGEST))})"

    def __str__(self) -> str:
        return "\n  ".join([type(self).__name__, *self._shown(": ", _LONGEST_LINE)])

    def _shown(self, between: str, longest: int) -> list[str]:
        """Return the names and values of the fields that are not longer, and the names of the others."""
        texts = {item.name: repr(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]
        shown = [f"{name}{between}{text}" for name, text in texts.items() if len(text) <= longest]
        hidden = [name for name, text in texts.items() if len(text) > longest]
        return [*shown, f"further: {', '.join(hidden)}"] if hidden else shown
