"""Checks rows with images: which trainers are probed on them, and how the images have to be stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import ProcessorMixin

from autotune.core.workload import DatasetSource
from autotune.errors import InputError, UnreadError
from autotune.step.images.sizes import image_column, image_feature
from autotune.trainers.base import Trainer
from autotune.trainers.declared import DatasetFormat

_KIND = "type"
_IMAGES = ("image", "image_url")
"""What the type of a part of a message is, where the part is an image."""


def check_images(trainer: Trainer, source: DatasetSource, rows: Dataset, form: DatasetFormat, processor: Any) -> None:
    """Check that a trainer can be probed on the images of rows, if they have any.

    Args:
        form: of the rows.
        processor: the model's, or its tokenizer if it has none.

    Raises:
        InputError: it cannot.
        UnreadError: the trainer takes rows of text alone here.
    """
    column = image_column(rows)
    if column is None:
        return
    found = f"{source.name} has images (column {column}), and"
    if not trainer.takes_images:
        raise UnreadError(
            f"{found} autotune plans and measures {trainer.label} on rows of text alone.",
            hint=f"Give rows without the column {column}, if only their text is to be trained on.",
        )
    if not isinstance(processor, ProcessorMixin):
        raise InputError(
            f"{found} the model has no processor of images.",
            hint="Give a vision-language model, with its processor_config.json or preprocessor_config.json.",
        )
    if not form.with_images:
        # TRL's trainer leaves out all other columns (``_set_signature_columns_if_needed``).
        taken = " or ".join(known.name for known in trainer.formats if known.with_images)
        raise InputError(
            f"{found} TRL trains {trainer.label} on images only with {taken}, and its rows have {form.name}.",
            hint="Put them into that form.",
        )
    if image_feature(rows, column) is None:
        kind, paths = (
            ("a list of images", "lists of the paths of their files")
            if column == "images"
            else ("an image", "the paths of their files")
        )
        raise InputError(
            f"{found} the values of that column are not images: datasets reads {rows.features[column]}.",
            hint=f"Cast it with datasets to {kind} (datasets.Image) and save the rows as Parquet, or give {paths}.",
        )


def check_no_images(source: DatasetSource, rows: Dataset, columns: Sequence[str]) -> None:
    """Check that no part of a message is an image where rows have no column of images.

    Args:
        columns: those that may hold messages.

    Raises:
        UnreadError: they have.
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
