"""Reads the sizes of a dataset's images as a training would decode them, and finds those that are broken."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List, Value

from autotune.errors import InputError, UnreadError

COLUMNS = ("image", "images")
"""Columns by which TRL's trainers take rows for rows with images (``_is_vision_dataset``). With both, TRL's
collator takes the first (``DataCollatorForVisionLanguageModeling``)."""
NO_LIST = "In a column images, a row without any has an empty list."
_TEXTS = ("string", "large_string")
_OPENED_MODE = "RGB"
"""Mode of every image that transformers opens itself (``load_image``)."""
_WEB = ("http://", "https://")
_DATA = "data:image/"
_TORCHVISION = "torchvision"
"""Backend of those image processors of transformers that decode strings with torchvision
(``TorchvisionBackend.fetch_images``), not with Pillow; the others open them with ``load_image``."""
_DECODED = frozenset({"JPEG", "MPO", "PNG", "WEBP", "GIF"})
_MOVING = frozenset({"WEBP", "GIF"})
"""Formats that ``torchvision.io.decode_image`` decodes, and those of which it makes no single image where a file has
several frames, by Pillow's names."""
_QUOTED = 80
"""Most characters of a string that a message quotes: it may be an encoded image."""
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}
"""The last bytes of a file that is not cut off, by Pillow's name of its format; bytes of others may follow them."""
_TURNED = frozenset({5, 6, 7, 8})
"""Orientations of EXIF with which width and height change places (CIPA DC-008, 4.6.5.1)."""


@dataclass(frozen=True)
class ImageSize:
    """An image as a processor receives it.

    Attributes:
        width, height: in pixels, after the rotation that EXIF asks for.
        mode: Pillow's name of its kind of pixels, such as ``RGB`` or ``CMYK``.
    """

    width: int
    height: int
    mode: str = "RGB"

    @property
    def pixels(self) -> int:
        """Number of its pixels."""
        return self.width * self.height


def image_column(rows: Dataset) -> str | None:
    """Return the column from which TRL takes the images of rows, or None if they have none."""
    return next((name for name in COLUMNS if name in rows.column_names), None)


def image_feature(rows: Dataset, column: str) -> Image | Value | None:
    """Return the feature of the images in a column; None if TRL's collators take its values for no images.

    They take images that ``datasets`` decodes, and strings, which transformers' image processors open.
    """
    feature = rows.features[column]
    inner = feature.feature if isinstance(feature, List) else feature
    if isinstance(feature, List) != (column == "images"):
        return None
    if isinstance(inner, Image):
        return inner if inner.decode else None
    return inner if isinstance(inner, Value) and inner.dtype in _TEXTS else None


def names_files(rows: Dataset) -> bool:
    """Return whether the images of rows are files that the rows name."""
    column = image_column(rows)
    return column is not None and isinstance(image_feature(rows, column), Value)


def image_sizes(rows: Dataset, processor: Any, name: str) -> Iterator[tuple[ImageSize, ...] | None]:
    """Yield the sizes of each row's images, in the order of the rows; None for a row with null for a list of them.

    Args:
        processor: the image processor of the model, which opens images that are strings.
        name: the user's name of the dataset, for messages.

    Raises:
        InputError: an image is null, or cannot be read, here or by the processor.
        UnreadError: an image is on the web.
    """
    column = image_column(rows)
    assert column is not None
    feature = image_feature(rows, column)
    assert feature is not None
    stored, mode = rows.select_columns([column]), _OPENED_MODE
    decoded = getattr(processor, "backend", None) == _TORCHVISION
    if isinstance(feature, Image):
        encoded, mode, decoded = Image(decode=False), feature.mode, False
        stored = stored.cast_column(column, List(encoded) if column == "images" else encoded)
    for number, row in enumerate(stored, start=1):
        images = row[column] if column == "images" else [row[column]]
        if images is None:
            yield None
            continue
        if None in images:
            raise InputError(f"Row {number} of {name} has no {column}.", hint=f"Remove such rows. {NO_LIST}")
        files = (_file(image, number, name) if isinstance(image, str) else image for image in images)
        yield tuple(_size(file, mode, decoded, number, name) for file in files)


def _file(text: str, row: int, name: str) -> dict[str, Any]:
    """Return the image that a string stands for in transformers' image processors, as ``datasets`` stores images."""
    quoted = text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
    if text.startswith(_WEB):
        raise UnreadError(
            f"Row {row} of {name} has an image on the web, {quoted}.",
            hint="TRL would download it for every micro-batch. Save it, and name the file.",
        )
    # Path.is_file raises an error for long strings, which hold an image themselves.
    if os.path.isfile(text):  # noqa: PTH113
        return {"bytes": None, "path": text}
    try:
        encoded = text.partition(",")[2] if text.startswith(_DATA) else text
        content = base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError:
        raise InputError(
            f"Row {row} of {name} names the image {quoted}, which is not a file.",
            hint=f"TRL opens it from the folder in which training is started, now {Path.cwd()}. Start where the paths "
            "of the images lead to them, or write whole paths.",
        ) from None
    return {"bytes": content, "path": quoted}


def _is_whole(stored: dict[str, Any], kind: str | None) -> bool:
    """Return whether a file ends as its format does. Decoding a JPEG, which shows it too, takes 20 times as long."""
    mark = _ENDS.get(kind or "")
    if mark is None:
        return False
    if stored["bytes"] is not None:
        return bool(stored["bytes"].endswith(mark))
    with Path(stored["path"]).open("rb") as file:
        file.seek(-min(len(mark), file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read() == mark


def _check_decoded(image: Any, path: str, row: int, name: str) -> None:
    """Check that torchvision makes one image of a file that Pillow has opened.

    Raises:
        InputError: it does not.
    """
    frames = image.n_frames if image.format in _MOVING else 1
    if image.format not in _DECODED or frames > 1:
        found = f"{frames} frames" if frames > 1 else f"the format {image.format}"
        raise InputError(
            f"Row {row} of {name} has an image of {found}, which TRL cannot read with this model: {path}",
            hint="The model's image processor opens paths with torchvision: save the image as PNG or JPEG, or put it "
            "into a column of datasets.Image.",
        )


def _size(stored: dict[str, Any], mode: str | None, decoded: bool, row: int, name: str) -> ImageSize:
    from PIL import ExifTags
    from PIL import Image as Pillow

    content = stored["bytes"]
    try:
        with Pillow.open(BytesIO(content) if content is not None else stored["path"]) as image:
            size, own = image.size, image.mode
            if decoded:
                _check_decoded(image, stored["path"], row, name)
            if not _is_whole(stored, image.format):
                image.load()
            width, height = reversed(size) if image.getexif().get(ExifTags.Base.Orientation) in _TURNED else size
            return ImageSize(width, height, mode or own)
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        path = stored["path"] or "its image"
        raise InputError(
            f"Row {row} of {name} has an image that cannot be read: {path}: {error}",
            hint="Remove the row, or write the image again.",
        ) from error
