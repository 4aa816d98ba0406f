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
    geometry: BatchGeometry, images: ImageProfile, multiple: int, drawn: int, *, evaluated: int = 0
) -> BatchGeometry:
    """Return a geometry whose micro-batches are rows of the dataset, since tokens do not determine their images.

    Where rows are drawn for several micro-batches, these are divided among them in their order. A trace runs the first
    of these micro-batches: the worst one begins with the rows with the most image data, a typical one with those whose
    image data are nearest to the mean.

    Args:
        geometry: of the same rows by their tokens, padded.
        multiple: to which the widest sequence of a micro-batch is rounded up.
        drawn: rows of the dataset that are drawn at once, for a micro-batch or several.
        evaluated: of rows to evaluate on, how many rows of a micro-batch each of them makes; 0: they are to train on.
    """
    import numpy as np

    loads, rows = images.loads, geometry.worst.rows
    elements = loads.image_elements
    assert elements is not None

    def shape_of(chosen: Numbers, like: Shape) -> Shape:
        width = rounded_up(int(loads.widest[chosen].max()), multiple)
        # The loss counts completions alone, where some are generated.
        filled = 1.0 if like.generated else float(loads.widest[chosen].sum()) / (rows * width)
        order = chosen.repeat(evaluated or 1)
        return Shape(rows, width + like.generated, like.generated, 0.0, filled, tuple(order.tolist()), bool(evaluated))

    several = geometry.sequences > 1
    found = heaviest(loads, drawn, padded=True, multiple=multiple, several=several)
    worst, *rivals = (
        shape_of(chosen[np.argsort(-elements[chosen], kind="stable")], geometry.worst) for chosen in found
    )
    shares: dict[Shape, float] = {}
    for chosen in _representatives(images, drawn, multiple):
        from_mean = np.abs(elements[chosen] - elements[chosen].mean())
        shape = shape_of(chosen[np.argsort(from_mean, kind="stable")], geometry.sizes[0].shape)
        shares[shape] = shares.get(shape, 0.0) + 1 / _STRATA
    sizes = tuple(Typical(shape, share) for shape, share in shares.items())
    # The trace of a micro-batch runs them at their own sizes.
    apart = tuple(replace(phase, worst=worst, sizes=sizes) for phase in geometry.apart)
    return replace(geometry, worst=worst, rivals=tuple(rivals), sizes=sizes, apart=apart)


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
