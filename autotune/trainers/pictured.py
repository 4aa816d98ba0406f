"""Chooses the rows with images that a plan's micro-batches are traced on, from the sizes of all rows of a dataset."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.core.batch_geometry import BatchGeometry, Shape, Typical, rounded_up
from autotune.core.heaviest import heaviest
from autotune.core.images import ImageProfile

if TYPE_CHECKING:
    from autotune.core.table import Numbers

_DRAWN = 192
"""Random micro-batches that are drawn as those of an epoch."""
_STRATA = 3
"""Groups of them by size. One micro-batch of each is traced, and stands for the time of its group."""


def with_images(
    geometry: BatchGeometry, images: ImageProfile, multiple: int, *, evaluated: bool = False
) -> BatchGeometry:
    """Return a geometry whose micro-batches are rows of the dataset, since tokens do not determine their images.

    Args:
        geometry: of the same rows by their tokens, padded.
        multiple: to which the widest sequence of a micro-batch is rounded up.
        evaluated: whether the rows are those to evaluate on.
    """
    loads, rows = images.loads, geometry.worst.rows

    def shape_of(chosen: Numbers) -> Shape:
        width = rounded_up(int(loads.widest[chosen].max()), multiple)
        filled = float(loads.widest[chosen].sum()) / (rows * width)
        return Shape(rows, width, filled=filled, chosen=tuple(chosen.tolist()), evaluated=evaluated)

    several = geometry.sequences > 1
    worst, *rivals = map(shape_of, heaviest(loads, rows, padded=True, multiple=multiple, several=several))
    shares: dict[Shape, float] = {}
    for chosen in _representatives(images, rows, multiple):
        shares[shape_of(chosen)] = shares.get(shape_of(chosen), 0.0) + 1 / _STRATA
    sizes = tuple(Typical(shape, share) for shape, share in shares.items())
    return replace(geometry, worst=worst, rivals=tuple(rivals), sizes=sizes)


def _representatives(images: ImageProfile, rows: int, multiple: int) -> list[Numbers]:
    """Return a micro-batch for each group of equally many random ones: that whose sizes are nearest to its mean."""
    import numpy as np

    loads, generator, population = images.loads, np.random.default_rng(0), len(images.alike)
    drawn = np.stack([np.resize(generator.permutation(population), rows) for _ in range(_DRAWN)])
    widths = -(-loads.widest[drawn].max(axis=1) // multiple) * multiple
    assert loads.image_elements is not None
    sizes = np.stack([widths, loads.image_elements[drawn].sum(axis=1)], axis=1, dtype=float)
    groups = np.lexsort(sizes.T[::-1]).reshape(_STRATA, -1)
    scale = np.maximum(sizes.mean(axis=0), 1.0)
    nearest = (np.abs((sizes[group] - sizes[group].mean(axis=0)) / scale).sum(axis=1).argmin() for group in groups)
    return [np.sort(images.alike[drawn[group[place]]]) for group, place in zip(groups, nearest, strict=True)]
