"""The sizes of a dataset's images, as stored and as the processor returns them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from autotune.core.rows.heaviest import RowSummary
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.rows.table import Table

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers


@dataclass(frozen=True)
class ImageLimit:
    """The images of a dataset under one limit of the model's processor.

    Attributes:
        setting: field of the image processor with its value, such as ``size.longest_edge=50176``.
        tokens: tokens of the images in each row, with the processor's tokens around and between them.
        elements: elements of each row's ``pixel_values``, the vision tower's input.
    """

    setting: str
    tokens: LengthDistribution
    elements: LengthDistribution


@dataclass(frozen=True)
class ImageProfile:
    """The images of a dataset.

    Attributes:
        in_row: number of images in each row.
        pixels: width times height of each stored image.
        elements: elements of each row's ``pixel_values``, the vision tower's input.
        ends: tokens of each row up to the last one of an image; 0 without one. TRL fails on a row that is cut to fewer.
        rows: for each row of the dataset, in order: tokens of its longest and of its shortest sequence, tokens in the
            loss, and elements. None in documents.
        by_path: whether rows have paths of image files, which may change while the dataset does not.
        limits: the processor's limit, and smaller ones with an effect; empty unless requested.
    """

    in_row: LengthDistribution
    pixels: LengthDistribution
    elements: LengthDistribution
    ends: LengthDistribution
    rows: Table | None = None
    by_path: bool = False
    limits: tuple[ImageLimit, ...] = ()

    @cached_property
    def row_summary(self) -> RowSummary:
        """The sizes of rows that the memory of a micro-batch depends on."""
        assert self.rows is not None
        return RowSummary(*self.rows.rows().T)

    @cached_property
    def alike(self) -> Numbers:
        """For each row, the index of the first row with the same sizes; shape (rows,)."""
        import numpy as np

        assert self.rows is not None
        _, first, same = np.unique(self.rows.rows(), axis=0, return_index=True, return_inverse=True)
        return np.asarray(first[same.ravel()])


@dataclass(frozen=True)
class ChosenRows:
    """Rows of a tokenised dataset on which a trace trains, since images cannot be made up from sizes.

    Attributes:
        directory: where ``prepare`` saved the dataset.
        fingerprint: of the dataset; see :class:`autotune.core.workload.DatasetProfile`.
        indices: of the rows.
    """

    directory: str
    fingerprint: str
    indices: tuple[int, ...]
