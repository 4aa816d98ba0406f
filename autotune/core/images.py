"""The sizes of a dataset's images: as they are stored, and as a model's processor makes them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.lengths import LengthDistribution


@dataclass(frozen=True)
class ImageProfile:
    """The images of a dataset.

    Attributes:
        in_row: number of images in each row.
        pixels: width times height of each image as it is stored.
        elements: numbers that the model's vision tower gets of each row (``pixel_values``).
    """

    in_row: LengthDistribution
    pixels: LengthDistribution
    elements: LengthDistribution

    @property
    def distributions(self) -> tuple[LengthDistribution, ...]:
        """All three, in the order of the attributes."""
        return self.in_row, self.pixels, self.elements
