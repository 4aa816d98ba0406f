"""Reads the sizes of a dataset's images from the headers of their files, as ``datasets`` would decode them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from datasets import Dataset, Image, List

from autotune.errors import InputError

COLUMNS = ("image", "images")
"""Columns by which TRL's trainers take rows for rows with images (``_is_vision_dataset``). With both, TRL's
collator takes the first (``DataCollatorForVisionLanguageModeling``)."""
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


def image_feature(rows: Dataset, column: str) -> Image | None:
    """Return the feature of the images in a column; None if ``datasets`` does not decode them as images."""
    feature = rows.features[column]
    inner = feature.feature if isinstance(feature, List) else feature
    fits = isinstance(feature, List) == (column == "images")
    return inner if fits and isinstance(inner, Image) and inner.decode else None


def image_sizes(rows: Dataset, name: str) -> Iterator[tuple[ImageSize, ...]]:
    """Yield the sizes of each row's images, in the order of the rows.

    Args:
        name: the user's name of the dataset, for messages.

    Raises:
        InputError: a row has no list of images, or an image cannot be read.
    """
    column = image_column(rows)
    assert column is not None
    feature = image_feature(rows, column)
    assert feature is not None
    mode, encoded = feature.mode, Image(decode=False)
    stored = rows.select_columns([column]).cast_column(column, List(encoded) if column == "images" else encoded)
    for number, row in enumerate(stored, start=1):
        images = row[column] if column == "images" else [row[column]]
        if images is None or None in images:
            raise InputError(
                f"Row {number} of {name} has no {column}.",
                hint="Remove such rows; in a column images, a row without any has an empty list.",
            )
        yield tuple(_size(image, mode, number, name) for image in images)


def _size(stored: dict[str, Any], mode: str | None, row: int, name: str) -> ImageSize:
    from PIL import ExifTags
    from PIL import Image as Pillow

    content = stored["bytes"]
    try:
        with Pillow.open(BytesIO(content) if content is not None else stored["path"]) as image:
            # Pillow decodes a PNG to look for EXIF behind the pixels, where no common program writes it.
            in_header = image.format != "PNG" or "exif" in image.info
            orientation = image.getexif().get(ExifTags.Base.Orientation) if in_header else None
            width, height = reversed(image.size) if orientation in _TURNED else image.size
            return ImageSize(width, height, mode or image.mode)
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        path = stored["path"] or "its image"
        raise InputError(
            f"Row {row} of {name} has an image that cannot be read: {path}: {error}",
            hint="Remove the row, or write the image again.",
        ) from error
