"""Which rows make the micro-batches that may need the most memory, where the rows are known one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.core.batch_geometry import worst_micro_batches
from autotune.core.blocks import block_rows, blocks_of, worst_blocks

if TYPE_CHECKING:
    from autotune.core.table import Numbers


@dataclass(frozen=True)
class Loads:
    """Sizes of rows on which the memory of a micro-batch depends; each of shape (rows,).

    Attributes:
        widest, shortest: tokens of each row's longest and shortest sequence.
        trainable: tokens that the loss counts.
        image_elements: numbers that the vision tower gets; None for rows of text.
        beside: tokens of each row's sequence in a second tensor, which depends on the rows of its micro-batch; None
            without one.
    """

    widest: Numbers
    shortest: Numbers
    trainable: Numbers
    image_elements: Numbers | None = None
    beside: Numbers | None = None

    def cut_to(self, length: int | None) -> Loads:
        """Return the sizes after sequences are cut to a length, in tokens; None: they are not cut.

        The loss is taken to count all tokens that are cut from the longest sequence of a row, and none of the others'.
        """
        if length is None:
            return self
        widest, shortest = self.widest.clip(max=length), self.shortest.clip(max=length)
        trainable = (self.trainable - (self.widest - widest)).clip(min=0)
        return replace(self, widest=widest, shortest=shortest, trainable=trainable)


def heaviest(loads: Loads, rows: int, *, padded: bool, multiple: int, several: bool) -> tuple[Numbers, ...]:
    """Return the rows of the micro-batches that may need the most memory, by index, the widest first.

    Among rows of equal length, those with the most trainable tokens come first. With the widest micro-batch come
    those with more trainable tokens, if there are any, or with a larger sum of both: on a GPU, TRL computes logits of
    trainable tokens only (trl/trainer/utils.py, add_fused_lm_head), so that a wide prompt with a short answer may need
    less than rows that are narrower and all answer. With them come those with more image data, on which a vision
    tower's memory depends.

    Args:
        rows: of a micro-batch.
        padded, multiple: as in :func:`autotune.core.batch_geometry.worst_micro_batches`.
        several: whether a row has several sequences.
    """
    import numpy as np

    longest_first = np.lexsort((-loads.trainable, loads.shortest, -loads.widest))
    chosen = worst_micro_batches(
        loads.widest[longest_first],
        rows,
        padded=padded,
        multiple=multiple,
        shortest=loads.shortest[longest_first] if several else None,
    )
    widest = [longest_first[list(positions)] for positions in chosen]
    both = loads.widest / max(1, loads.widest.max()) + loads.trainable / max(1, loads.trainable.max())
    further = [np.argsort(-both, kind="stable")]
    for load in (loads.trainable, loads.image_elements):
        if load is not None:
            further = [*_with(longest_first[0], np.lexsort((-loads.widest, -load))), *further]
    return (*widest, *heavier(loads, widest, [np.resize(order, rows) for order in further], padded=padded))


def heaviest_blocks(loads: Loads, rows: int, multiple: int) -> tuple[Numbers, ...]:
    """Return the rows of the blocks of so many successive rows that may need the most memory, the widest first.

    With the worst of them (:func:`autotune.core.blocks.worst_blocks`) comes the one with the most trainable tokens; see
    :func:`heaviest`.
    """
    import numpy as np

    every = block_rows(len(loads.widest), rows)
    known = blocks_of(loads.widest, loads.beside, rows, multiple, loads.image_elements)
    worst = [every[place] for place in worst_blocks(known)]
    # Tokens of a last block count once, though its rows are repeated where it is run.
    trainable = np.add.reduceat(loads.trainable, every[:, 0])
    return (*worst, *heavier(loads, worst, [every[trainable.argmax()]]))


def _with(widest: int, order: Numbers) -> list[Numbers]:
    """Return an order of rows, after one that begins with the widest: padding makes the others as wide as that."""
    import numpy as np

    return [np.concatenate([[widest], order[order != widest]]), order]


def heavier(
    loads: Loads, chosen: Sequence[Numbers], further: Iterable[Numbers], *, padded: bool = True
) -> list[Numbers]:
    """Return the further micro-batches that no other equals or exceeds in trainable tokens, size and image data.

    Their size is that of their widest row where they are padded, and the sum of their rows where these lie end to end.
    """

    def needs(rows: Numbers) -> tuple[int, ...]:
        pictured = 0 if loads.image_elements is None else int(loads.image_elements[rows].sum())
        tokens = loads.widest[rows].max() if padded else loads.widest[rows].sum()
        return int(loads.trainable[rows].sum()), int(tokens), pictured

    found: list[Numbers] = []
    for rows in further:
        wanted = needs(rows)
        known = map(needs, (*chosen, *found))
        if not any(all(have >= want for have, want in zip(others, wanted, strict=True)) for others in known):
            found.append(rows)
    return found
