"""Micro-batches that are blocks of successive rows, always the same ones, and which may need the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.batch_geometry import has_padding, rounded_up


@dataclass(frozen=True)
class Block:
    """The rows of one micro-batch.

    Attributes:
        rows: rows of the dataset in it; the last block of an epoch may have fewer than the others.
        tokens: tokens of its widest sequence, padding included.
        padded: whether a sequence is padded, which brings an attention mask.
        beside: the same as ``tokens`` for a second tensor, which passes through models without gradients; 0: none.
        beside_padded: the same as ``padded`` for that.
    """

    rows: int
    tokens: int
    padded: bool
    beside: int = 0
    beside_padded: bool = False

    @property
    def needs(self) -> tuple[int, ...]:
        """What memory grows with: tokens and the square of the length in each tensor, and the masks."""
        sizes = (self.rows * size**power for size in (self.tokens, self.beside) for power in (1, 2))
        return (*sizes, self.padded, self.beside_padded)


def blocks_of(lengths: Sequence[int], beside: Sequence[int] | None, rows: int, multiple: int = 1) -> list[Block]:
    """Return the blocks of so many successive rows, in order; the last one may have fewer.

    Args:
        lengths: tokens of each row's sequence after cutting; not empty.
        beside: tokens of each row's sequence in the second tensor after cutting, or None without one.
        multiple: the length of a tensor is rounded up to a multiple of this.
    """
    found = []
    for start in range(0, len(lengths), rows):
        own, other = lengths[start : start + rows], beside[start : start + rows] if beside is not None else None
        second = (rounded_up(max(other), multiple), has_padding(other, multiple)) if other is not None else (0, False)
        found.append(Block(len(own), rounded_up(max(own), multiple), has_padding(own, multiple), *second))
    return found


def worst_blocks(blocks: Sequence[Block]) -> list[int]:
    """Return the positions of the blocks of which each may need the most memory, the widest first.

    Any other block needs at most as much as one of these. Which of these needs the most depends on the model: a block
    with a wider second tensor holds less while it passes through the model if its first tensor is narrower.

    Example: of blocks with widths (9, 4), (8, 7) and (7, 6), the first two are returned: the third is narrower than the
    second in both tensors.
    """
    first: dict[Block, int] = {}
    for position, block in enumerate(blocks):
        first.setdefault(block, position)
    front: list[Block] = []
    # A block that needs at least as much in every respect comes before those that it makes superfluous.
    for block in sorted(first, key=lambda block: block.needs, reverse=True):
        needs = block.needs
        if not any(all(map(int.__ge__, other.needs, needs)) for other in front):
            front.append(block)
    widest_first = sorted(front, key=lambda block: (block.tokens, block.padded, block.beside), reverse=True)
    return [first[block] for block in widest_first]
