"""The shapes of a training's micro-batches, shared by probes and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise

_RARE = 0.01
"""Share of micro-batches that may be timed as larger ones."""


class Layout(StrEnum):
    """How rows are arranged in a micro-batch's tensor; each layout has its own attention masks, and so its kernels."""

    EQUAL = "rows of equal length"
    PADDED = "padded rows"
    FLAT = "rows end to end"


@dataclass(frozen=True, order=True)
class Shape:
    """The size of a micro-batch.

    Attributes:
        rows: ``per_device_train_batch_size``; 1 if rows are laid end to end.
        tokens: tokens of the widest sequence, padding included, or of the one row; a mean need not be a whole number.
        generated: number of these tokens that the trained model generates.
        beside: tokens of the widest sequence of a second tensor of as many rows, which passes through models without
            gradients; 0: there is none, or it is as wide as the first.
        filled: the share of the tokens, 0 to 1, that are not padding where the loss leaves padding out.
        chosen: the rows of the dataset that it consists of, by index, where tokens do not determine them, since images
            belong to them; empty elsewhere. More rows than it has are those of several micro-batches, drawn at once; it
            is made of the first of them.
        evaluated: whether these are rows of the dataset that training is evaluated on.
        trained: the share of the tokens, 0 to 1, padding left out, that the loss counts; 0: that of the whole dataset.
    """

    rows: int
    tokens: float
    generated: float = 0
    beside: float = 0.0
    filled: float = 1.0
    chosen: tuple[int, ...] = ()
    evaluated: bool = False
    trained: float = 0.0


@dataclass(frozen=True)
class Recompiled:
    """The largest micro-batches for which code is recompiled after the worst one, as shares of its width.

    Attributes:
        narrower: those of another width; 0: there are none.
        unpadded: those without padding, where the worst has some; 0: there are none.
        generated: completions of a generation batch, which a trace may have more or fewer of; 0: nothing is generated.
    """

    narrower: float = 0.0
    unpadded: float = 0.0
    generated: int = 0


@dataclass(frozen=True)
class Typical:
    """A size that represents a share of an epoch's micro-batches in the mean time.

    Attributes:
        shape: in whole rows and tokens.
        share: of all micro-batches; those of a geometry add up to 1.
    """

    shape: Shape
    share: float = 1.0


def mean_shape(sizes: Sequence[Typical]) -> Shape:
    """Return the mean shape, whose tokens need not be whole."""
    if len(sizes) == 1:
        return sizes[0].shape
    means = (
        sum(size.share * getattr(size.shape, name) for size in sizes)
        for name in ("tokens", "generated", "beside", "filled")
    )
    return Shape(sizes[0].shape.rows, *means)


@dataclass(frozen=True)
class PhaseGeometry:
    """The sizes of a phase that does not run on one micro-batch, such as the generation of completions.

    A trace of a micro-batch runs the phase too, at a size that follows from the micro-batch's. The shapes are those of
    micro-batches whose traces run the phase at its real size.

    Attributes:
        phase: its name in the step program.
        worst: the shape with which it needs the most memory.
        sizes: shapes whose weighted mean time is its mean time.
        per_step: mean number of its runs in an optimizer step; in a micro-batch, for a phase that leads each one.
    """

    phase: str
    worst: Shape
    sizes: tuple[Typical, ...]
    per_step: float

    def shape_for(self, micro_batch: Shape) -> Shape:
        """Return the shape of :attr:`worst`, or that of a micro-batch whose own trace runs the phase on its rows."""
        return micro_batch if micro_batch.chosen else self.worst

    @property
    def typical(self) -> Shape:
        """The mean of the sizes."""
        return mean_shape(self.sizes)


@dataclass(frozen=True)
class BatchGeometry:
    """The micro-batches and optimizer steps of a training plan on a dataset.

    Attributes:
        layout: layout of the worst micro-batch.
        worst: shape of the micro-batch that needs the most memory.
        sizes: a few sizes that represent all micro-batches of an epoch: their weighted mean time is that of all.
        tokens: mean dataset tokens of a micro-batch, padding excluded.
        documents: mean number of the dataset's documents in an optimizer step, over all processes.
        rows: rows of an epoch as the trainer sees them: packed rows, or documents that were not dropped.
        micro_batches: micro-batches of an optimizer step in one process.
        sequences: sequences that each row sends through the model: two for a preference pair.
        apart: phases with sizes of their own.
        rivals: shapes of other micro-batches that may need more memory than ``worst``, depending on the model: they are
            narrower, but their second tensor is wider, or the loss counts more of their tokens.
        evaluation: the micro-batches of evaluation; None without one.
        ranks: processes that train on micro-batches of their own.
    """

    layout: Layout
    worst: Shape
    sizes: tuple[Typical, ...]
    tokens: float
    documents: float
    rows: int
    micro_batches: int = 1
    sequences: int = 1
    apart: tuple[PhaseGeometry, ...] = ()
    rivals: tuple[Shape, ...] = ()
    evaluation: BatchGeometry | None = None
    ranks: int = 1

    def in_steps(self, micro_batches: int, ranks: int) -> BatchGeometry:
        """Return the geometry of steps of so many micro-batches in each of the ranks, given that of steps of one."""
        documents = self.documents * micro_batches * ranks
        return replace(self, documents=documents, micro_batches=micro_batches, ranks=ranks)

    @cached_property
    def typical(self) -> Shape:
        """The mean shape of micro-batches."""
        return mean_shape(self.sizes)

    @cached_property
    def awaited(self) -> tuple[Typical, ...]:
        """The sizes, with the share of each among the largest of the micro-batches that all ranks run at once.

        The other ranks wait for the largest: TRL gathers metrics in each (``gather_for_metrics`` in ``compute_loss``,
        trl 1.16). Sizes that are almost never the largest count as the next larger size.
        """
        if self.ranks == 1:
            return self.sizes
        ascending = sorted(self.sizes, key=lambda size: (size.shape.tokens, size.shape.beside))
        below = [share**self.ranks for share in accumulate((size.share for size in ascending), initial=0.0)]
        ends = [end for end in below[1:-1] if end >= _RARE]
        kept = ascending[len(ascending) - len(ends) - 1 :]
        return tuple(
            replace(size, share=end - start)
            for size, (start, end) in zip(kept, pairwise([0.0, *ends, below[-1]]), strict=True)
        )

    @property
    def tokens_per_step(self) -> float:
        """Dataset tokens of an optimizer step, over all processes."""
        return self.tokens * self.micro_batches * self.ranks

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the micro-batches of which each may need the most memory."""
        return (self.worst, *self.rivals)


def rounded_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``tokens``."""
    return -(-tokens // multiple) * multiple
