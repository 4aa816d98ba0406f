"""Finds rows with images, which autotune neither plans nor measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from autotune.core.workload import DatasetSource
from autotune.errors import InputError

_COLUMNS = ("image", "images")
"""Columns by which TRL's trainers take rows for rows with images (``_is_vision_dataset``)."""
_KIND = "type"
_IMAGES = ("image", "image_url")
"""What the type of a part of a message is, where the part is an image."""


def check_no_images(source: DatasetSource, rows: Dataset, columns: Sequence[str]) -> None:
    """Check that rows have no column of images, and no image among the parts of a message.

    Args:
        columns: those that may hold messages.

    Raises:
        InputError: they have.
    """
    found = [name for name in _COLUMNS if name in rows.column_names]
    if found:
        raise InputError(
            f"{source.name} has images (column {found[0]}), and autotune plans and measures rows of text alone.",
            hint=f"Give rows without the column {found[0]}, if only their text is to be trained on.",
        )
    for column in (name for name in columns if name in rows.column_names):
        if any(_has_image(chunk) for chunk in rows.with_format("arrow")[:][column].chunks):
            raise InputError(
                f"{source.name} has images (in messages of {column}), and autotune plans and measures rows of text "
                "alone.",
                hint="Give rows whose messages are text.",
            )


def _has_image(values: pa.Array) -> bool:
    """Whether a part of messages is an image: ``{"type": "image", …}``, at any depth."""
    if isinstance(values, pa.ExtensionArray):
        # Parts that differ in their keys are kept as JSON (datasets.Json).
        may_have_images = pc.or_(*(pc.match_substring(values.storage, f'"{name}"') for name in _IMAGES))
        return any(_is_image_inside(json.loads(text)) for text in values.storage.filter(may_have_images).to_pylist())
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return _has_image(values.flatten())
    if not pa.types.is_struct(values.type):
        return False
    return any(
        _names_image(part) if field.name == _KIND else _has_image(part)
        for field, part in zip(values.type, values.flatten(), strict=True)
    )


def _names_image(kinds: pa.Array) -> bool:
    texts = pa.types.is_string(kinds.type) or pa.types.is_large_string(kinds.type)
    return texts and bool(pc.any(pc.is_in(kinds, pa.array(_IMAGES, kinds.type))).as_py())


def _is_image_inside(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get(_KIND) in _IMAGES or any(_is_image_inside(part) for part in value.values())
    return isinstance(value, list) and any(_is_image_inside(part) for part in value)
