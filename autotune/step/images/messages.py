"""Finds images inside messages, where autotune takes none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from autotune.core.workload import DatasetSource
from autotune.errors import UnreadError
from autotune.step.images.sizes import image_column

_TYPE_KEY = "type"
_IMAGE_TYPES = ("image", "image_url")
"""Types of message parts that are images."""


def check_no_images(source: DatasetSource, rows: Dataset, columns: Sequence[str]) -> None:
    """Check that messages contain no images if the rows have no image column.

    Args:
        columns: columns that may hold messages.

    Raises:
        UnreadError: a message contains an image.
    """
    if image_column(rows) is not None:
        return
    for column in (name for name in columns if name in rows.column_names):
        if any(_has_image(chunk) for chunk in rows.with_format("arrow")[:][column].chunks):
            raise UnreadError(
                f"{source.name} has images (in messages of {column}), and autotune takes images only from "
                "a column image or images.",
                hint="Give rows whose messages are text, or put the images into a column images.",
            )


def _has_image(values: pa.Array) -> bool:
    """Whether a part of messages is an image: ``{"type": "image", …}``, at any depth."""
    if isinstance(values, pa.ExtensionArray):
        # Parts with different keys are stored as JSON (datasets.Json).
        may_have_images = pc.or_(*(pc.match_substring(values.storage, f'"{name}"') for name in _IMAGE_TYPES))
        return any(_is_image_inside(json.loads(text)) for text in values.storage.filter(may_have_images).to_pylist())
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return _has_image(values.flatten())
    if not pa.types.is_struct(values.type):
        return False
    return any(
        _has_image_type(part) if field.name == _TYPE_KEY else _has_image(part)
        for field, part in zip(values.type, values.flatten(), strict=True)
    )


def _has_image_type(kinds: pa.Array) -> bool:
    texts = pa.types.is_string(kinds.type) or pa.types.is_large_string(kinds.type)
    return texts and bool(pc.any(pc.is_in(kinds, pa.array(_IMAGE_TYPES, kinds.type))).as_py())


def _is_image_inside(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get(_TYPE_KEY) in _IMAGE_TYPES or any(_is_image_inside(part) for part in value.values())
    return isinstance(value, list) and any(_is_image_inside(part) for part in value)
