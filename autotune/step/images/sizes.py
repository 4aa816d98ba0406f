"""Reads the sizes of a dataset's images as training decodes them, and reports broken images."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, Image, List, Value

from autotune.errors import InputError, UnreadError

COLUMNS = ("image", "images")
"""Columns by which TRL's trainers recognise rows with images (``_is_vision_dataset``). If both exist, TRL's collators
read the first (``DataCollatorForVisionLanguageModeling``), and trainers that generate the second."""
NO_LIST = "In a column images, a row without any has an empty list."
_BATCH_ROWS = 100
_TEXTS = ("string", "large_string")
_STRING_MODE = "RGB"
"""Pillow mode of images that transformers opens itself (``load_image``)."""
_URL_PREFIXES = ("http://", "https://")
_DATA_PREFIX = "data:image/"
_TORCHVISION = "torchvision"
"""Backend of transformers' image processors that open strings with torchvision (``TorchvisionBackend.fetch_images``);
the others open them with Pillow (``load_image``)."""
_TORCHVISION_FORMATS = frozenset({"JPEG", "MPO", "PNG", "WEBP", "GIF"})
_MULTI_FRAME = frozenset({"WEBP", "GIF"})
"""Pillow's names of the formats that ``torchvision.io.decode_image`` decodes, and of those that may have several
frames, which it does not decode as one image."""
_MAX_QUOTED = 80
"""Maximum characters of a string in a message: the string may be an encoded image."""
_END_MARKERS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}
"""The last bytes of a complete file, by Pillow's name of its format; other data may follow them."""
_ROTATED = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height (CIPA DC-008, 4.6.5.1)."""


@dataclass(frozen=True)
class ImageSize:
    """The size and mode of an image as a processor receives it.

    Attributes:
        width, height: in pixels, after the rotation by EXIF.
        mode: Pillow's mode, such as ``RGB`` or ``CMYK``.
    """

    width: int
    height: int
    mode: str = "RGB"

    @property
    def pixels(self) -> int:
        """Number of its pixels."""
        return self.width * self.height


def image_column(rows: Dataset) -> str | None:
    """Return the column from which TRL reads images, or None if there is none."""
    return next((name for name in COLUMNS if name in rows.column_names), None)


def has_images(rows: Dataset) -> bool:
    """Return whether any row has an image: a list may be empty or null. A column of single images has some."""
    column = image_column(rows)
    if column is None or not isinstance(rows.features[column], List):
        return column is not None
    batches = rows.select_columns([column]).with_format("arrow").iter(_BATCH_ROWS)
    return any(pc.sum(pc.list_value_length(batch[column])).as_py() for batch in batches)


def image_feature(rows: Dataset, column: str) -> Image | Value | None:
    """Return the feature of the images in a column; None if TRL's collators do not accept its values as images.

    They accept images that ``datasets`` decodes, and strings, which transformers' image processors open.
    """
    feature = rows.features[column]
    inner = feature.feature if isinstance(feature, List) else feature
    if isinstance(feature, List) != (column == "images"):
        return None
    if isinstance(inner, Image):
        return inner if inner.decode else None
    return inner if isinstance(inner, Value) and inner.dtype in _TEXTS else None


def names_files(rows: Dataset) -> bool:
    """Return whether the image column holds strings, such as paths."""
    column = image_column(rows)
    return column is not None and isinstance(image_feature(rows, column), Value)


def image_sizes(rows: Dataset, processor: Any, name: str) -> Iterator[tuple[ImageSize, ...] | None]:
    """Yield the sizes of each row's images, in the order of the rows; None for a row whose list of images is null.

    Args:
        processor: the image processor of the model, which opens strings.
        name: the user's name of the dataset, for messages.

    Raises:
        InputError: an image is null, or cannot be read, here or by the processor.
        UnreadError: an image is on the web.
    """
    column = image_column(rows)
    assert column is not None
    feature = image_feature(rows, column)
    assert feature is not None
    stored, mode = rows.select_columns([column]), _STRING_MODE
    by_torchvision = getattr(processor, "backend", None) == _TORCHVISION
    if isinstance(feature, Image):
        encoded, mode, by_torchvision = Image(decode=False), feature.mode, False
        stored = stored.cast_column(column, List(encoded) if column == "images" else encoded)
    for number, row in enumerate(stored, start=1):
        images = row[column] if column == "images" else [row[column]]
        if images is None:
            yield None
            continue
        if None in images:
            raise InputError(f"Row {number} of {name} has no {column}.", hint=f"Remove such rows. {NO_LIST}")
        files = (_file(image, number, name) if isinstance(image, str) else image for image in images)
        yield tuple(_size(file, mode, by_torchvision, number, name) for file in files)


def _file(text: str, row: int, name: str) -> dict[str, Any]:
    """Return the image that transformers' image processors open for a string, in the storage format of ``datasets``."""
    quoted = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
    if text.startswith(_URL_PREFIXES):
        raise UnreadError(
            f"Row {row} of {name} has an image on the web, {quoted}.",
            hint="TRL would download it for every micro-batch. Save it, and name the file.",
        )
    # Path.is_file raises an error for long strings, which hold an image themselves.
    if os.path.isfile(text):  # noqa: PTH113
        return {"bytes": None, "path": text}
    try:
        encoded = text.partition(",")[2] if text.startswith(_DATA_PREFIX) else text
        content = base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError:
        raise InputError(
            f"Row {row} of {name} names the image {quoted}, which is not a file.",
            hint=f"TRL opens it from the folder in which training is started, now {Path.cwd()}. Start in the folder "
            "that the paths begin from, or write absolute paths.",
        ) from None
    return {"bytes": content, "path": quoted}


def _is_complete(stored: dict[str, Any], kind: str | None) -> bool:
    """Return whether a file ends like a complete one. Decoding a JPEG would show it too, but takes 20 times as long."""
    mark = _END_MARKERS.get(kind or "")
    if mark is None:
        return False
    if stored["bytes"] is not None:
        return bool(stored["bytes"].endswith(mark))
    with Path(stored["path"]).open("rb") as file:
        file.seek(-min(len(mark), file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read() == mark


def _check_decoded(image: Any, path: str, row: int, name: str) -> None:
    """Check that torchvision can decode a file that Pillow has opened, as a single image.

    Raises:
        InputError: it cannot.
    """
    frames = image.n_frames if image.format in _MULTI_FRAME else 1
    if image.format not in _TORCHVISION_FORMATS or frames > 1:
        found = f"{frames} frames" if frames > 1 else f"the format {image.format}"
        raise InputError(
            f"Row {row} of {name} has an image of {found}, which TRL cannot read with this model: {path}",
            hint="The model's image processor opens paths with torchvision: save the image as PNG or JPEG, or put it "
            "into a column of datasets.Image.",
        )


def _size(stored: dict[str, Any], mode: str | None, by_torchvision: bool, row: int, name: str) -> ImageSize:
    from PIL import ExifTags
    from PIL import Image as Pillow

    content = stored["bytes"]
    try:
        with Pillow.open(BytesIO(content) if content is not None else stored["path"]) as image:
            size, image_mode = image.size, image.mode
            if by_torchvision:
                _check_decoded(image, stored["path"], row, name)
            if not _is_complete(stored, image.format):
                image.load()
            width, height = reversed(size) if image.getexif().get(ExifTags.Base.Orientation) in _ROTATED else size
            return ImageSize(width, height, mode or image_mode)
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        path = stored["path"] or "its image"
        raise InputError(
            f"Row {row} of {name} has an image that cannot be read: {path}: {error}",
            hint="Remove the row, or write the image again.",
        ) from error
