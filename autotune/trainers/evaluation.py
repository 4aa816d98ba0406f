"""The batch geometry of a plan on a whole workload: training rows, evaluation rows, and images."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Shape, Typical, rounded_up
from autotune.core.rows.blocks import block_rows
from autotune.core.rows.heaviest import Loads, heaviest, heaviest_blocks
from autotune.core.workload import DatasetProfile, Workload
from autotune.trainers.base import Trainer

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

_DRAWN = 192
"""Number of random micro-batches that represent an epoch."""
_STRATA = 3
"""Number of groups of these by size; one micro-batch of each group is traced for the group's time."""


def whole_geometry(trainer: Trainer, plan: TrainingPlan, workload: Workload) -> BatchGeometry:
    """Return the geometry of a plan on a workload, including evaluation."""
    geometry = trainer.geometry(plan, workload.dataset.documents)
    geometry = _with_images(geometry, trainer, plan, workload.dataset, trainer.rows_per_draw(plan))
    if workload.evaluation is None or not plan.evaluates:
        return geometry
    documents = workload.evaluation.documents
    copies, asked = trainer.copies(plan, evaluated=True), plan.count("per_device_eval_batch_size")
    share = (workload.rows_split_off or documents.rows) / documents.rows
    # Packing may make more rows than the dataset has, and a maximum length fewer.
    rows = min(asked, max(1, ceil(trainer.evaluated(plan, documents, asked).rows * share)))
    evaluation = trainer.evaluated(plan, documents, rows)
    evaluation = _with_images(evaluation, trainer, plan, workload.evaluation, max(1, rows // copies), copies)
    return replace(geometry, evaluation=evaluation)


def _with_images(
    geometry: BatchGeometry,
    trainer: Trainer,
    plan: TrainingPlan,
    profile: DatasetProfile,
    drawn: int,
    copies_in_evaluation: int = 0,
) -> BatchGeometry:
    """Return the geometry of rows with images: its micro-batches are dataset rows, since tokens determine no images.

    If rows are drawn for several micro-batches, a trace runs the first of these: in the worst draw, it has the rows
    with the most image data; in a typical one, those nearest to the mean.

    Args:
        geometry: the geometry of the same rows by their tokens, padded; returned unchanged without images.
        drawn: number of dataset rows drawn at once, for one micro-batch or several.
        copies_in_evaluation: micro-batch rows for each evaluation row; 0: training rows.
    """
    if profile.images is None:
        return geometry
    loads, multiple, blocks = trainer.loads(plan, profile.images, drawn), plan.pad_multiple, trainer.ordered
    count, elements, alike = geometry.worst.rows, loads.image_elements, profile.images.alike
    assert elements is not None

    def width(tokens: Numbers | None, chosen: Numbers) -> int:
        return 0 if tokens is None else rounded_up(int(tokens[chosen].max()), multiple)

    def shape_of(chosen: Numbers, near: float, like: Shape) -> Shape:
        # Blocks keep the order of the dataset.
        order = chosen if blocks else chosen[abs(elements[chosen] - near).argsort(kind="stable")]
        widest, beside = width(loads.widest, chosen), width(loads.beside, chosen)
        # If completions are generated, the loss only counts them.
        filled = 1.0 if like.generated else float(loads.widest[chosen].sum()) / (count * widest)
        rows = tuple(order.repeat(copies_in_evaluation or 1).tolist())
        return Shape(count, widest + like.generated, like.generated, beside, filled, rows, bool(copies_in_evaluation))

    found = (
        heaviest_blocks(loads, drawn, multiple) if blocks else heaviest(loads, drawn, padded=True, multiple=multiple)
    )
    worst, *rivals = (shape_of(chosen, elements.max(), geometry.worst) for chosen in found)
    shares: dict[Shape, float] = {}
    for chosen in _representatives(loads, elements, alike, drawn, multiple, blocks=blocks):
        shape = shape_of(chosen, elements[chosen].mean(), geometry.sizes[0].shape)
        shares[shape] = shares.get(shape, 0.0) + 1 / _STRATA
    sizes = tuple(Typical(shape, share) for shape, share in shares.items())
    # The trace of a micro-batch runs these phases at their own sizes.
    apart = tuple(replace(phase, worst=worst, sizes=sizes) for phase in geometry.apart)
    return replace(geometry, worst=worst, rivals=tuple(rivals), sizes=sizes, apart=apart)


def _representatives(
    loads: Loads, elements: Numbers, alike: Numbers, rows: int, multiple: int, *, blocks: bool
) -> list[Numbers]:
    """Return a micro-batch for each of :data:`_STRATA` groups of random ones: the one nearest to the group's mean.

    Args:
        elements: elements of each row's ``pixel_values``.
        alike: for each row, the index of the first row with the same sizes.
        rows: number of dataset rows drawn at once, for one micro-batch or several.
        multiple: the widest sequence of a micro-batch is rounded up to a multiple of this.
        blocks: whether rows are drawn in fixed blocks of successive rows; else at random.
    """
    import numpy as np

    drawn = _random_micro_batches(len(alike), rows, blocks=blocks)
    tensors = [tokens[drawn].max(axis=1) for tokens in (loads.widest, loads.beside) if tokens is not None]
    widths = [-(-width // multiple) * multiple for width in tensors]
    sizes = np.stack([*widths, elements[drawn].sum(axis=1)], axis=1, dtype=float)
    groups = np.lexsort(sizes.T[::-1]).reshape(_STRATA, -1)
    scale = np.maximum(sizes.mean(axis=0), 1.0)
    nearest = (np.abs((sizes[group] - sizes[group].mean(axis=0)) / scale).sum(axis=1).argmin() for group in groups)
    chosen = [alike[drawn[group[place]]] for group, place in zip(groups, nearest, strict=True)]
    return chosen if blocks else [np.sort(each) for each in chosen]


@lru_cache
def _random_micro_batches(population: int, rows: int, *, blocks: bool) -> Numbers:
    """Return random micro-batches of ``rows`` rows, or blocks in random order; shape (micro-batches, rows)."""
    import numpy as np

    generator = np.random.default_rng(0)
    if not blocks:
        return np.stack([np.resize(generator.permutation(population), rows) for _ in range(_DRAWN)])
    whole = block_rows(population, rows)[: max(1, population // rows)]
    return np.asarray(whole[np.resize(generator.permutation(len(whole)), _DRAWN)])
