"""How what a bundle says of its training came about: by measuring it, or by planning alone."""

from __future__ import annotations

from enum import StrEnum


class Basis(StrEnum):
    """Where the figures of a bundle come from.

    ``MEASURED``: real steps, by ``autotune probe``. ``PLANNED``: traces, by ``autotune plan``; nothing has run.
    """

    MEASURED = "measured"
    PLANNED = "planned"
