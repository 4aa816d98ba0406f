"""A document of an engine that records which keys are read of it."""

from __future__ import annotations

from typing import Any


class Recording(dict[str, Any]):
    """A dictionary with the keys that were read of it in ``read``."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Record a key, and return its value or the default."""
        self.read.add(name)
        return super().get(name, default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Record a key, and return its value, which is the default if it has none."""
        self.read.add(name)
        return super().setdefault(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """Record a key, and remove it."""
        self.read.add(name)
        return super().pop(name, *default)

    def keys(self) -> Any:
        """Return the document itself, so that ``name in document.keys()`` is recorded."""
        return self
