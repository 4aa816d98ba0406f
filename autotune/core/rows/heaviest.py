"""Chooses the rows of the worst micro-batches, which may need the most memory, from the sizes of all rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.core.rows.blocks import block_rows, blocks_of, worst_blocks

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers


@dataclass(frozen=True)
class RowSummary:
    """The sizes of rows on which the memory of a micro-batch depends; each of shape (rows,).

    Attributes:
        widest, shortest: tokens of each row's longest and shortest sequence.
        trainable: tokens that the loss counts.
        image_elements: numbers that the vision tower gets; None for rows of text.
        second_tokens: tokens of each row's sequence in a second tensor, which depends on the rows of its micro-batch;
            None without one.
    """

    widest: Numbers
    shortest: Numbers
    trainable: Numbers
    image_elements: Numbers | None = None
    second_tokens: Numbers | None = None

    def rounded(self, multiple: int) -> Numbers:
        """Return the tokens of each row's longest sequence, rounded up to a multiple; shape (rows,)."""
        return -(-self.widest // multiple) * multiple

    def is_padded(self, multiple: int) -> Numbers:
        """Return which rows need padding in a micro-batch of their own, or of equal rows; shape (rows,)."""
        is_shorter: Numbers = self.shortest < self.rounded(multiple)
        return is_shorter

    def cut_to(self, length: int | None) -> RowSummary:
        """Return the sizes after sequences are cut to a length, in tokens; None: they are not cut.

        All tokens cut from the longest sequence of a row are assumed to be in the loss, and none of the others'.
        """
        if length is None:
            return self
        widest, shortest = self.widest.clip(max=length), self.shortest.clip(max=length)
        trainable = (self.trainable - (self.widest - widest)).clip(min=0)
        return replace(self, widest=widest, shortest=shortest, trainable=trainable)


def heaviest(sizes: RowSummary, rows: int, *, padded: bool, multiple: int) -> tuple[Numbers, ...]:
    """Return the rows of the micro-batches that may need the most memory, by index, the widest first.

    One of them has the longest rows. If these need no padding, transformers passes no attention mask to the model; a
    shorter row among them adds the mask, and with sdpa also disables grouped-query attention. So in a second
    micro-batch, the longest shorter row, if any, replaces one of the longest. It is returned first, since its tensors
    took at least as many bytes in all measurements and traces of both. In micro-batches of one row, none can join the
    longest, so that the longest padded row is a micro-batch of its own.

    Example: rows of 512, 512, 512 and 500 tokens, two to a micro-batch, give (512, 500) and (512, 512).

    Among rows of equal length, rows that also have a shorter sequence come first, then those with the most trainable
    tokens. Further micro-batches have more trainable tokens than the widest, or a larger sum of both: on a GPU, TRL
    computes logits of trainable tokens only (trl/trainer/utils.py, add_fused_lm_head), so that a wide prompt with a
    short answer may need less than narrower rows that consist of answers. Others have more image data, on which a
    vision tower's memory depends.

    Args:
        rows: of a micro-batch. If the dataset has fewer, they are repeated, as in a probe.
        padded: whether sequences are padded to the longest of their micro-batch, instead of being laid end to end.
        multiple: the padded length is rounded up to a multiple of this.
    """
    import numpy as np

    longest_first = np.lexsort((-sizes.trainable, sizes.shortest, -sizes.widest))
    longest, widths = np.resize(longest_first, rows), sizes.rounded(multiple)
    widest = [longest]
    if padded and sizes.shortest[longest].min() == widths[longest[0]]:
        # A shorter row pads several rows; a single row is padded by its own shorter sequence, or by rounding up.
        with_mask = sizes.is_padded(multiple) if rows == 1 else sizes.widest < sizes.widest[longest[0]]
        masked = [np.append(longest[:-1], place) for place in longest_first[with_mask[longest_first]][:1]]
        widest = sorted([*masked, longest], key=lambda chosen: -widths[chosen].max())
    both = sizes.widest / max(1, sizes.widest.max()) + sizes.trainable / max(1, sizes.trainable.max())
    further = [np.argsort(-both, kind="stable")]
    for load in (sizes.trainable, sizes.image_elements):
        if load is not None:
            further = [*_with_widest(longest_first[0], np.lexsort((-sizes.widest, -load))), *further]
    return (*widest, *further_heavy(sizes, widest, [np.resize(order, rows) for order in further], padded=padded))


def heaviest_blocks(sizes: RowSummary, rows: int, multiple: int) -> tuple[Numbers, ...]:
    """Return the rows of the blocks of ``rows`` successive rows that may need the most memory, the widest first.

    They are :func:`autotune.core.rows.blocks.worst_blocks` and the block with the most trainable tokens; see
    :func:`heaviest`.
    """
    import numpy as np

    every = block_rows(len(sizes.widest), rows)
    known = blocks_of(sizes.widest, sizes.second_tokens, rows, multiple, sizes.image_elements)
    worst = [every[place] for place in worst_blocks(known)]
    # Tokens of an incomplete last block count once, although its rows are repeated when it runs.
    trainable = np.add.reduceat(sizes.trainable, every[:, 0])
    return (*worst, *further_heavy(sizes, worst, [every[trainable.argmax()]]))


def heaviest_unpadded(
    sizes: RowSummary, rows: int, multiple: int, *, blocks: bool, alone: bool = False
) -> Numbers | None:
    """Return the rows of the widest micro-batch without padding, those with the most image data; None if there is none.

    Args:
        rows: drawn at once, for one micro-batch or several.
        alone: whether each is a micro-batch of its own, padded to the widest of all; the first one has no padding.
        multiple: the padded length is rounded up to a multiple of this.
        blocks: whether micro-batches are blocks of successive rows; else any rows may share one.
    """
    import numpy as np

    widths = sizes.rounded(multiple)
    elements = np.zeros_like(widths) if sizes.image_elements is None else sizes.image_elements
    if blocks:
        every = block_rows(len(widths), rows)
        width = widths[every].max(axis=1)
        full = np.flatnonzero((sizes.shortest[every] == width[:, None]).all(axis=1))
        ranked = full[np.lexsort((-elements[every[full]].sum(axis=1), -width[full]))]
        return every[ranked[0]] if len(ranked) else None
    full = np.flatnonzero(~sizes.is_padded(multiple))
    full = full[np.lexsort((-elements[full], -widths[full]))]
    if alone and len(full):
        narrower = np.flatnonzero(widths <= widths[full[0]])
        others = narrower[np.lexsort((-elements[narrower], narrower == full[0]))]
        return np.append(full[0], np.resize(others, rows - 1))
    alike = np.flatnonzero(widths[full[: max(0, len(full) - rows + 1)]] == widths[full[rows - 1 :]])
    return full[alike[0] :][:rows] if len(alike) else None


def _with_widest(widest: int, order: Numbers) -> list[Numbers]:
    """Return an order of rows twice: after the widest row, to which the others are then padded, and unchanged."""
    import numpy as np

    return [np.concatenate([[widest], order[order != widest]]), order]


def further_heavy(
    sizes: RowSummary, chosen: Sequence[Numbers], further: Iterable[Numbers], *, padded: bool = True
) -> list[Numbers]:
    """Return the further micro-batches that no other equals or exceeds in trainable tokens, size and image data.

    The size is the tokens of the widest row if rows are padded, and of all rows if they are laid end to end.
    """

    def needs(rows: Numbers) -> tuple[int, ...]:
        pictured = 0 if sizes.image_elements is None else int(sizes.image_elements[rows].sum())
        tokens = sizes.widest[rows].max() if padded else sizes.widest[rows].sum()
        return int(sizes.trainable[rows].sum()), int(tokens), pictured

    found: list[Numbers] = []
    for rows in further:
        wanted = needs(rows)
        known = map(needs, (*chosen, *found))
        if not any(all(have >= want for have, want in zip(others, wanted, strict=True)) for others in known):
            found.append(rows)
    return found
