"""Tokenises rows with images as TRL's trainers do, on blank images of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from trl.data_utils import is_conversational, prepare_multimodal_messages

from autotune.core.rows.images import ImageProfile
from autotune.core.rows.table import Table
from autotune.errors import InputError, first_line
from autotune.step.images.sizes import COLUMNS, NO_LIST, ImageSize, image_column, image_sizes, names_files
from autotune.step.rows import Counts, distribution
from autotune.trainers.base import Trainer
from autotune.trainers.prompts import PROMPT

IMAGE_ELEMENTS = "image_elements"
"""Column with the number of elements of ``pixel_values`` for a row's images."""
IMAGE_PIXELS = "image_pixels"
"""Column with the pixels of each image of a row."""
IMAGE_ENDS = "image_ends"
"""Column with the number of a row's tokens up to the last image token."""
IMAGE_COLUMNS = (IMAGE_ELEMENTS, IMAGE_PIXELS, IMAGE_ENDS)
_PIXELS = "pixel_values"
_MAX_KEPT_ELEMENTS = 4096
"""Number of elements up to which an image processor's arrays keep their values, such as grids and sizes, from which the
processor counts tokens."""


Tokens = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns the token columns of a row, given the collated micro-batch of this row alone."""
Processed = Callable[[dict[str, Any]], tuple[Mapping[str, Any], Any]]
"""Returns the token columns of a row, and the arrays of its images or None."""


def with_collated(trainer: Any, columns: Sequence[str], tokens_of: Tokens, name: str) -> Dataset:
    """Return the rows of a trainer whose collator tokenises them, with columns of tokens and sizes.

    Args:
        columns: columns that the collator reads in addition to the images, if they exist. Others are dropped.
        name, Raises: see :func:`with_tokens`.
    """
    rows, collator = trainer.train_dataset, trainer.data_collator

    def process(row: dict[str, Any]) -> tuple[Mapping[str, Any], Any]:
        collated = collator([row])
        return tokens_of(collated), collated.get(_PIXELS)

    read = rows.select_columns([column for column in (*columns, *COLUMNS) if column in rows.column_names])
    return with_tokens(read, collator.processor, process, name)


def with_prompts(trainer: Any, extra_tokens: Tokens, name: str) -> Dataset:
    """Return the rows of a trainer that processes images with prompts before it generates, with tokens and sizes.

    The images are put into the messages of a prompt as in ``GRPOTrainer._generate_and_score_completions``.

    Args:
        extra_tokens: returns further token columns of a row.
        name, Raises: see :func:`with_tokens`.
    """

    def process(row: dict[str, Any]) -> tuple[Mapping[str, Any], Any]:
        if not is_conversational({"prompt": row["prompt"]}):
            raise ValueError("images need a prompt of messages, not of text")
        images = row["images"] if "images" in row else [row["image"]]
        if images is None:
            raise ValueError("images are null, which TRL passes to the processor")
        (ids,), _, fields = trainer._tokenize_prompts([prepare_multimodal_messages(row["prompt"], images=images)])
        return {PROMPT: ids, **extra_tokens(row)}, fields.get(_PIXELS)

    return with_tokens(trainer.train_dataset, trainer.processing_class, process, name)


def with_tokens(rows: Dataset, processor: Any, process: Processed, name: str) -> Dataset:
    """Return rows with images with columns of tokens and sizes added.

    Args:
        processor: the model's, which ``process`` uses.
        name: the user's name of the dataset, for messages.

    Raises:
        InputError: an image cannot be read, or TRL refuses a row.
    """
    column = image_column(rows)
    assert column is not None
    texts = rows.remove_columns([added for added in COLUMNS if added in rows.column_names])
    tokens: dict[str, list[Any]] = {added: [] for added in IMAGE_COLUMNS}
    with mock.patch.object(processor, "image_processor", _CachingImageProcessor(processor.image_processor)):
        for number, (row, sizes) in enumerate(
            zip(texts, image_sizes(rows, processor.image_processor, name), strict=True), start=1
        ):
            # Null stays null: one of TRL's collators accepts it as no images, the others fail on it.
            images = None if sizes is None else [blank_image(size) for size in sizes]
            # TRL modifies its arguments in place.
            example = {**deepcopy(row), column: images[0] if images and column == "image" else images}
            try:
                row_tokens, pixels = process(example)
            except Exception as error:
                # Chat templates, processors and TRL may raise any exception for a row.
                raise InputError(
                    f"Row {number} of {name} cannot be trained on by TRL: {first_line(error)}",
                    hint=NO_LIST if sizes is None else "Look at its images and at their places in its messages.",
                ) from error
            for added, values in row_tokens.items():
                tokens.setdefault(added, []).append(np.asarray(values, dtype=np.int64).tolist())
            tokens[IMAGE_ELEMENTS].append([count_elements(pixels)])
            tokens[IMAGE_PIXELS].append([size.pixels for size in sizes or ()])
            # Images are in the first column: the whole row, or its prompt.
            ids = next(iter(row_tokens.values()))
            tokens[IMAGE_ENDS].append([image_end(ids, processor) if sizes else 0])
    for added, values in tokens.items():
        rows = rows.add_column(added, values)
    return rows


def image_end(ids: Any, processor: Any) -> int:
    """Return the number of tokens up to the last image token, or of all if the processor does not define image tokens.

    Idefics 3 also needs the token after an image, to locate its end (``char_to_token`` in its ``__call__``).
    """
    (positions,) = np.isin(ids, [*processor.image_token_ids, getattr(processor, "fake_image_token_id", -1)]).nonzero()
    return int(positions[-1]) + 1 if len(positions) else len(ids)


def count_elements(arrays: Any) -> int:
    """Return the number of elements of an array, or of arrays in nested lists; 0 for None."""
    if isinstance(arrays, (list, tuple)):
        return sum(map(count_elements, arrays))
    return 0 if arrays is None else prod(arrays.shape)


def image_elements(rows: Dataset) -> Counts | None:
    """Return the elements of ``pixel_values`` of each tokenised row; shape (rows,). None for rows of text."""
    if IMAGE_ELEMENTS not in rows.column_names:
        return None
    return np.array(rows.select_columns([IMAGE_ELEMENTS])[:][IMAGE_ELEMENTS])[:, 0]


def image_profile(rows: Dataset, trainer: Trainer, lengths: Counts, trainable: Counts) -> ImageProfile | None:
    """Return the sizes of the images in tokenised rows; None for rows of text.

    Args:
        lengths: tokens of each row in each of the trainer's parts; shape (rows, parts).
        trainable: tokens of each row that the loss counts; shape (rows,).
    """
    elements = image_elements(rows)
    if elements is None:
        return None
    _, *sequences = trainer.document(tuple(lengths.T))
    pixels = rows.select_columns([IMAGE_PIXELS])[:][IMAGE_PIXELS]
    return ImageProfile(
        in_row=distribution([len(images) for images in pixels]),
        pixels=distribution([size for images in pixels for size in images]),
        elements=distribution(elements),
        ends=distribution(np.array(rows.select_columns([IMAGE_ENDS])[:][IMAGE_ENDS])[:, 0]),
        rows=Table([np.max(sequences, axis=0), np.min(sequences, axis=0), trainable, elements]),
        by_path=names_files(rows),
    )


@lru_cache(4)
def blank_image(size: ImageSize) -> Any:
    """Return a blank image."""
    from PIL import Image

    return Image.new(size.mode, (size.width, size.height))


class _CachingImageProcessor:
    """An image processor that processes blank images once for each combination of sizes."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._cache: dict[object, Any] = {}

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        key = (_sizes(images), repr(args), repr(sorted(kwargs.items())))
        if key not in self._cache:
            outputs = self._process(images, *args, **kwargs)
            outputs.data = {name: _without_values(values) for name, values in outputs.data.items()}
            self._cache[key] = outputs
        return deepcopy(self._cache[key])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def _sizes(images: Any) -> object:
    return tuple(map(_sizes, images)) if isinstance(images, (list, tuple)) else images and (images.mode, images.size)


def _without_values(values: Any) -> Any:
    """Replace large arrays by zeros expanded from one element: only the shape of pixel arrays is needed."""
    if isinstance(values, (list, tuple)):
        return [_without_values(value) for value in values]
    if isinstance(values, torch.Tensor) and values.numel() > _MAX_KEPT_ELEMENTS:
        return torch.zeros((), dtype=values.dtype).expand(values.shape)
    if isinstance(values, np.ndarray) and prod(values.shape) > _MAX_KEPT_ELEMENTS:
        return np.broadcast_to(np.zeros((), dtype=values.dtype), values.shape)
    return values
