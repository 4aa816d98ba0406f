"""Which calls of a compiled function Dynamo compiles it for: guards on kinds of calls and on sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

Numbers = Mapping[str, int]
"""The sizes and integers of a call, by their places in it."""


class Versions:
    """The compiled versions of one function.

    Dynamo compiles the first call for exactly its numbers. A number that differs from those of earlier compilations is
    a symbol in all later ones, whatever kind of call they are for (``torch/_dynamo/pgo.py``, FrameStateSizeEntry); a
    symbol is never 0 or 1, which are always constants (``specialize_zero_one``, ``torch/fx/experimental/_config.py``).
    """

    def __init__(self) -> None:
        self._seen: dict[str, int | None] = {}
        self._versions: dict[Hashable, list[dict[str, int | None]]] = {}

    def compiled_for(self, kind: Hashable, numbers: Numbers) -> Mapping[str, int | None] | None:
        """Return the version that a call is compiled for, or None if an earlier version runs it.

        Args:
            kind: all properties of the call that are guarded besides numbers.

        Returns:
            the constant of each number, None where it is a symbol.
        """
        versions = self._versions.setdefault(kind, [])
        if any(_runs(version, numbers) for version in versions):
            return None
        for name, number in numbers.items():
            self._seen[name] = number if self._seen.get(name, number) == number else None
        version = {name: number if number in (0, 1) else self._seen[name] for name, number in numbers.items()}
        versions.append(version)
        return version


def _runs(version: Mapping[str, int | None], numbers: Numbers) -> bool:
    return version.keys() == numbers.keys() and all(
        number > 1 if version[name] is None else number == version[name] for name, number in numbers.items()
    )
