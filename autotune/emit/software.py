"""Names the versions of the software that figures hold for."""

from __future__ import annotations

from collections.abc import Mapping

_SOFTWARE = ("torch", "transformers", "trl", "peft", "accelerate", "driver")


def said_software(environment: Mapping[str, str]) -> str:
    """Return names and versions of the software that memory and speed depend on the most; empty if none is known."""
    return ", ".join(f"{name} {environment[name]}" for name in _SOFTWARE if name in environment)
