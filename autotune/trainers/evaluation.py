"""The batch geometry of a plan on a whole workload: training rows, evaluation rows, and images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import TYPE_CHECKING

from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical, rounded_up
from autotune.core.rows.blocks import block_rows
from autotune.core.rows.heaviest import RowSummary, heaviest, heaviest_blocks, heaviest_unpadded
from autotune.core.rows.images import ImageProfile
from autotune.core.workload import DatasetProfile, Workload
from autotune.trainers.base import Trainer

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

_DRAWN = 192
"""Number of random micro-batches that represent an epoch."""
_STRATA = 3
"""Most groups of these by size; one micro-batch of each group is traced for the group's time."""


def whole_geometry(trainer: Trainer, plan: TrainingPlan, workload: Workload) -> BatchGeometry:
    """Return the geometry of a plan on a workload, including evaluation."""
    geometry = trainer.geometry(plan, workload.dataset.documents)
    geometry = _with_images(geometry, trainer, plan, workload.dataset, trainer.rows_per_draw(plan))
    if workload.evaluation is None or not plan.evaluates:
        return geometry
    documents = workload.evaluation.documents
    copies, asked = trainer.copies(plan, evaluated=True), plan.count("per_device_eval_batch_size")
    share = (workload.documents_split_off or documents.rows) / documents.rows
    # Packing may make more rows than the dataset has, and a maximum length fewer.
    rows = min(asked, max(1, ceil(trainer.evaluation_geometry(plan, documents, asked).rows * share)))
    evaluation = trainer.evaluation_geometry(plan, documents, rows)
    evaluation = _with_images(evaluation, trainer, plan, workload.evaluation, max(1, rows // copies), copies)
    return replace(geometry, evaluation=evaluation)


def otherwise_padded(
    trainer: Trainer, plan: TrainingPlan, workload: Workload, geometry: BatchGeometry, *, unmasked: bool
) -> BatchGeometry | None:
    """Return the geometry with the widest padded micro-batches if the worst are unpadded, and the reverse.

    Padding brings an attention mask, and attention runs other kernels with a mask than without. None if there are no
    such micro-batches, in training or in evaluation.

    Args:
        geometry: as :func:`whole_geometry` returns it.
        unmasked: whether micro-batches without padding may need more memory than wider ones with padding; else they are
            left out.
    """

    def other(part: BatchGeometry, profile: DatasetProfile, drawn: int, copies: int = 0) -> BatchGeometry | None:
        if part.layout in (Layout.EQUAL, Layout.FLAT):
            return part.with_mask
        if not unmasked:
            return None
        sizes = {**plan.args, "per_device_train_batch_size": part.worst.rows}
        if profile.images is None:
            return trainer.without_padding(replace(plan, args=sizes), profile.documents, part)
        pictured = _Pictured(trainer, plan, profile.images, drawn, copies)
        alone = trainer.generates and part.worst.rows == 1
        chosen = heaviest_unpadded(pictured.row_summary, drawn, plan.pad_multiple, blocks=trainer.ordered, alone=alone)
        if chosen is None:
            return None
        worst = pictured.shape(chosen, part.worst, float(pictured.elements[chosen[0]]))
        return replace(part, layout=Layout.EQUAL, worst=worst, rivals=())

    trained = other(geometry, workload.dataset, trainer.rows_per_draw(plan))
    evaluated, evaluation = None, geometry.evaluation
    # Completions of an evaluation are those of training.
    if evaluation is not None and workload.evaluation is not None and not trainer.generates:
        evaluated = other(evaluation, workload.evaluation, evaluation.worst.rows, 1)
    if trained is None and evaluated is None:
        return None
    return replace(trained or geometry, evaluation=evaluated or evaluation)


@dataclass(frozen=True)
class _Pictured:
    """Micro-batches of rows with images, which are rows of the dataset, since tokens determine no images.

    Attributes:
        images: the rows.
        drawn: number of dataset rows drawn at once, for one micro-batch or several.
        copies: micro-batch rows for each evaluation row; 0: training rows.
    """

    trainer: Trainer
    plan: TrainingPlan
    images: ImageProfile
    drawn: int
    copies: int

    @cached_property
    def row_summary(self) -> RowSummary:
        """The sizes of the rows."""
        return self.trainer.row_summary(self.plan, self.images, self.drawn)

    @cached_property
    def elements(self) -> Numbers:
        """Elements of each row's ``pixel_values``."""
        elements = self.row_summary.image_elements
        assert elements is not None
        return elements

    def shape(self, chosen: Numbers, like: Shape, near: float | None = None) -> Shape:
        """Return the shape of a micro-batch.

        If rows are drawn for several micro-batches, a trace runs the first of these: it has the rows with the most
        image data, or those nearest to a number of elements.

        Args:
            chosen: the rows that are drawn with it.
            like: a shape of the same rows by their tokens.
            near: elements; None: the most.
        """
        elements, multiple = self.elements, self.plan.pad_multiple
        near = elements.max() if near is None else near
        # Blocks keep the order of the dataset.
        order = chosen if self.trainer.ordered else chosen[abs(elements[chosen] - near).argsort(kind="stable")]

        def width(tokens: Numbers | None) -> int:
            return 0 if tokens is None else rounded_up(int(tokens[chosen].max()), multiple)

        widest, second_tokens = width(self.row_summary.widest), width(self.row_summary.second_tokens)
        # If completions are generated, the loss only counts them.
        filled = 1.0 if like.generated else float(self.row_summary.widest[chosen].sum()) / (like.rows * widest)
        rows = tuple(order.repeat(self.copies or 1).tolist())
        return Shape(like.rows, widest + like.generated, like.generated, second_tokens, filled, rows, bool(self.copies))


def _with_images(
    geometry: BatchGeometry, trainer: Trainer, plan: TrainingPlan, profile: DatasetProfile, drawn: int, copies: int = 0
) -> BatchGeometry:
    """Return the geometry of rows with images.

    Args:
        geometry: the geometry of the same rows by their tokens, padded; returned unchanged without images.
        drawn, copies: see :class:`_Pictured`.
    """
    if profile.images is None:
        return geometry
    pictured = _Pictured(trainer, plan, profile.images, drawn, copies)
    summary, elements, multiple, blocks = pictured.row_summary, pictured.elements, plan.pad_multiple, trainer.ordered
    found = (
        heaviest_blocks(summary, drawn, multiple)
        if blocks
        else heaviest(summary, drawn, padded=True, multiple=multiple)
    )
    worst, *rivals = (pictured.shape(chosen, geometry.worst) for chosen in found)
    shares: dict[Shape, float] = {}
    for chosen, share in _representatives(summary, elements, profile.images.alike, drawn, multiple, blocks=blocks):
        shape = pictured.shape(chosen, geometry.sizes[0].shape, elements[chosen].mean())
        shares[shape] = shares.get(shape, 0.0) + share
    sizes = tuple(Typical(shape, share) for shape, share in shares.items())
    # The trace of a micro-batch runs these phases at their own sizes.
    apart = tuple(replace(phase, worst=worst, sizes=sizes) for phase in geometry.phases)
    return replace(geometry, worst=worst, rivals=tuple(rivals), masked=None, sizes=sizes, phases=apart)


def _representatives(
    summary: RowSummary, elements: Numbers, alike: Numbers, rows: int, multiple: int, *, blocks: bool
) -> list[tuple[Numbers, float]]:
    """Return a micro-batch for each group of random ones by size, the one nearest to the group's mean, and its share.

    Args:
        elements: elements of each row's ``pixel_values``.
        alike: for each row, the index of the first row with the same sizes.
        rows: number of dataset rows drawn at once, for one micro-batch or several.
        multiple: the widest sequence of a micro-batch is rounded up to a multiple of this.
        blocks: whether rows are drawn in fixed blocks of successive rows; else at random.
    """
    import numpy as np

    drawn = _random_micro_batches(len(alike), rows, blocks=blocks)
    tensors = [tokens[drawn].max(axis=1) for tokens in (summary.widest, summary.second_tokens) if tokens is not None]
    widths = [-(-width // multiple) * multiple for width in tensors]
    sizes = np.stack([*widths, elements[drawn].sum(axis=1)], axis=1, dtype=float)
    distinct, kinds = np.unique(sizes, axis=0, return_inverse=True)
    groups = [np.flatnonzero(kinds.ravel() == kind) for kind in range(min(len(distinct), _STRATA))]
    if len(distinct) > _STRATA:
        groups = np.split(np.lexsort(sizes.T[::-1]), _STRATA)
    scale = np.maximum(sizes.mean(axis=0), 1.0)
    nearest = (np.abs((sizes[group] - sizes[group].mean(axis=0)) / scale).sum(axis=1).argmin() for group in groups)
    chosen = [alike[drawn[group[place]]] for group, place in zip(groups, nearest, strict=True)]
    return [
        (each if blocks else np.sort(each), len(group) / len(drawn)) for each, group in zip(chosen, groups, strict=True)
    ]


@lru_cache
def _random_micro_batches(population: int, rows: int, *, blocks: bool) -> Numbers:
    """Return micro-batches of ``rows`` rows in a sampler's order, or blocks in random order; shape (number, rows)."""
    import numpy as np

    generator = np.random.default_rng(0)
    if not blocks:
        epochs = [generator.permutation(population) for _ in range(-(-_DRAWN * rows // population))]
        return np.concatenate(epochs)[: _DRAWN * rows].reshape(_DRAWN, rows)
    whole = block_rows(population, rows)[: max(1, population // rows)]
    return np.asarray(whole[np.resize(generator.permutation(len(whole)), _DRAWN)])
