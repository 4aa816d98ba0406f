"""``autotune.catalogue``: the techniques, and which choices this machine supports."""

from __future__ import annotations

from typing import Literal

from autotune.app.catalogue import catalogue as read_catalogue
from autotune.core.catalogue import CatalogueRow
from autotune.trainers import DEFAULT


def catalogue(trainer: str = DEFAULT, device: Literal["auto", "cuda", "cpu"] = "auto") -> tuple[CatalogueRow, ...]:
    """Return the techniques of a trainer, and for each choice whether this machine can do it.

    Raises:
        InputError: there is no such trainer, or the device cannot be used.
    """
    return read_catalogue(trainer, device)
