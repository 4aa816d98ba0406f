"""Computes the tokens and pixel values of images under smaller limits of their processor, which reports suggest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from itertools import dropwhile, islice
from typing import Any

from datasets import Dataset

from autotune.core.rows.images import ImageLimit
from autotune.core.rows.lengths import LengthDistribution
from autotune.step.images.sizes import ImageSize, image_sizes
from autotune.step.images.tokens import blank_image, count_elements

_SIZE, _EDGE, _SPLITTING = "size", "longest_edge", "do_image_splitting"
"""Fields of image processors. ``longest_edge`` is an area for Qwen's models, and a length for Idefics 3 and SmolVLM,
which may also split images into tiles. Processors without it give each image the same number of tokens, or choose among
given sizes (Gemma 3, LLaVA-NeXT)."""
_MAX_LIMITS = 3
"""Maximum number of smaller limits, each half of the previous one; they end at the first without effect."""

_Images = tuple[ImageSize, ...]


def image_limits(rows: Dataset, processor: Any, name: str) -> tuple[ImageLimit, ...]:
    """Return the images of rows under the processor's limit and under smaller ones that change them.

    Returns:
        The present limit first; empty if the processor has none, or if no smaller one has an effect.

    Raises:
        InputError: an image cannot be read.
    """
    size = getattr(processor.image_processor, _SIZE, None)
    current = {key: value for key, value in dict(size or {}).items() if value is not None}
    if current.get(_EDGE) is None:
        return ()
    counts = Counter(images or () for images in image_sizes(rows, processor.image_processor, name))
    largest = Counter([max(counts, key=lambda images: sum(image.pixels for image in images))])
    present, at_largest = (_limit(processor, sizes, {_SIZE: current}) for sizes in (counts, largest))
    limits, smaller = [present], ({_SIZE: {**current, _EDGE: edge}} for edge in _halves(current))
    # Default limits are usually far above every image: skip those without effect.
    effective = dropwhile(lambda fields: _is_same(_limit(processor, largest, fields), at_largest), smaller)
    for fields in islice(effective, _MAX_LIMITS):
        limit = _limit(processor, counts, fields)
        if _is_same(limit, limits[-1]):
            break
        limits.append(limit)
    if getattr(processor.image_processor, _SPLITTING, None) is True:
        limits.append(_limit(processor, counts, {_SPLITTING: False}))
    changed = [limit for limit in limits[1:] if not _is_same(limit, present)]
    return (present, *changed) if changed else ()


def _halves(size: Mapping[str, int]) -> Iterator[int]:
    """Yield the half of a limit, the half of that, and so on."""
    edge = size[_EDGE] // 2
    while edge >= max(1, size.get("shortest_edge") or 1):
        yield edge
        edge //= 2


def _limit(processor: Any, counts: Mapping[_Images, int], fields: Mapping[str, Any]) -> ImageLimit:
    """Return the sizes of images under an image processor with other values of its fields.

    Args:
        counts: number of rows by the sizes of their images.
    """
    copied, image_processor = copy(processor), processor.image_processor
    copied.image_processor = type(image_processor).from_dict({**image_processor.to_dict(), **fields})
    tokens: Counter[int] = Counter()
    elements: Counter[int] = Counter()
    for images, count in counts.items():
        in_row, numbers_in_row = _processed(copied, images)
        tokens[in_row] += count
        elements[numbers_in_row] += count
    (field, value), *_ = fields.items()
    setting = f"{_SIZE}.{_EDGE}={value[_EDGE]}" if field == _SIZE else f"{field}={str(value).lower()}"
    return ImageLimit(setting, LengthDistribution(dict(tokens)), LengthDistribution(dict(elements)))


def _processed(processor: Any, images: _Images) -> tuple[int, int]:
    """Return the number of tokens of a row's images, and the number of elements of ``pixel_values``."""
    if not images:
        return 0, 0
    text = processor.image_token * len(images)
    outputs = processor(images=[[blank_image(size) for size in images]], text=[text], add_special_tokens=False)
    return len(outputs["attention_mask"][0]), count_elements(outputs["pixel_values"])


def _is_same(one: ImageLimit, other: ImageLimit) -> bool:
    return one.tokens == other.tokens and one.elements == other.elements
