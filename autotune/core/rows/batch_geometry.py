"""The batch geometry of a training plan: shapes of its micro-batches, rows and tokens of its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise

_RARE = 0.01
"""Largest share of micro-batches that may be timed at the next larger size."""


class Layout(StrEnum):
    """How rows are arranged in a micro-batch's tensor; each layout has its own attention masks, and so its kernels."""

    EQUAL = "rows of equal length"
    COMPLETED = "prompts of equal length, with completions of different lengths"
    PADDED = "padded rows"
    FLAT = "rows end to end"


@dataclass(frozen=True, order=True)
class Shape:
    """The size of a micro-batch.

    Attributes:
        rows: ``per_device_train_batch_size``; 1 if rows are laid end to end.
        tokens: tokens of the widest sequence, padding included, or of the one row; a mean may be fractional.
        generated: how many of these tokens the trained model generates.
        second_tokens: tokens of the widest sequence of a second tensor of as many rows, which passes through models
            without gradients; 0: there is none, or it is as wide as the first.
        filled: the share of the tokens, 0 to 1, that are not padding, if the loss leaves padding out.
        chosen: indices of its rows in the dataset, if they have images; else empty. If micro-batches are drawn
            together, the indices are those of all of them, its own first.
        evaluated: whether the rows are of the evaluation dataset.
        trained: the share of the tokens, 0 to 1, without padding, that the loss counts; 0: that of the whole dataset.
    """

    rows: int
    tokens: float
    generated: float = 0
    second_tokens: float = 0.0
    filled: float = 1.0
    chosen: tuple[int, ...] = ()
    evaluated: bool = False
    trained: float = 0.0


@dataclass(frozen=True)
class Recompiled:
    """The largest micro-batches for which code is recompiled after the worst one.

    Attributes:
        narrower: width of those narrower than the worst, as a share of its width; 0: there are none.
        unpadded: width of those without padding, if the worst has some, as a share of its width; 0: there are none.
        generated: completions of a generation batch; a trace may have another number; 0: nothing is generated.
    """

    narrower: float = 0.0
    unpadded: float = 0.0
    generated: int = 0


@dataclass(frozen=True)
class Typical:
    """A shape that represents a share of an epoch's micro-batches in the mean time.

    Attributes:
        shape: in whole rows and tokens.
        share: the share of all micro-batches; the shares of a geometry sum to 1.
    """

    shape: Shape
    share: float = 1.0


def mean_shape(sizes: Sequence[Typical]) -> Shape:
    """Return the weighted mean of shapes; its tokens may be fractional."""
    if len(sizes) == 1:
        return sizes[0].shape
    means = (
        sum(size.share * getattr(size.shape, name) for size in sizes)
        for name in ("tokens", "generated", "second_tokens", "filled")
    )
    return Shape(sizes[0].shape.rows, *means)


@dataclass(frozen=True)
class PhaseGeometry:
    """The sizes of a phase that does not run on one micro-batch, such as the generation of completions.

    A trace of a micro-batch also runs the phase, at a size that follows from the micro-batch's. The shapes here are
    those of micro-batches whose traces run the phase at its real sizes.

    Attributes:
        phase: its name in the step program.
        worst: the shape with which it needs the most memory.
        sizes: shapes whose weighted mean time is the phase's mean time.
        per_step: mean number of its runs in an optimizer step; for a phase that leads each micro-batch, in a
            micro-batch.
        layout: layout of those micro-batches; None: that of the geometry.
    """

    phase: str
    worst: Shape
    sizes: tuple[Typical, ...]
    per_step: float
    layout: Layout | None = None

    def shape_for(self, micro_batch: Shape) -> Shape:
        """Return :attr:`worst`, or the micro-batch's shape if its trace runs the phase on its own rows."""
        return micro_batch if micro_batch.chosen else self.worst


@dataclass(frozen=True)
class BatchGeometry:
    """The micro-batches and optimizer steps of a training plan on a dataset.

    Attributes:
        layout: layout of the worst micro-batch.
        worst: shape of the micro-batch that needs the most memory.
        sizes: a few sizes whose weighted mean time is that of all micro-batches of an epoch.
        tokens: mean dataset tokens of a micro-batch, padding excluded.
        documents: mean number of the dataset's documents in an optimizer step, over all processes.
        rows: rows of an epoch, as the trainer iterates over them: packed rows, or documents that were not dropped.
        micro_batches: micro-batches of an optimizer step in one process.
        sequences: sequences of each row that pass through the model: two for a preference pair.
        phases: phases with sizes of their own.
        rivals: shapes of other micro-batches that may need more memory than ``worst``, depending on the model: they are
            narrower, but their second tensor is wider, or the loss counts more of their tokens.
        masked: the widest padded micro-batch, if ``worst`` has no padding: it is narrower, but padding brings an
            attention mask; None: there is none.
        evaluation: the micro-batches of evaluation; None without evaluation.
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
    phases: tuple[PhaseGeometry, ...] = ()
    rivals: tuple[Shape, ...] = ()
    masked: Shape | None = None
    evaluation: BatchGeometry | None = None
    ranks: int = 1

    def in_steps(self, micro_batches: int, ranks: int) -> BatchGeometry:
        """Return the geometry with these numbers of micro-batches and ranks, given that with one of each."""
        documents = self.documents * micro_batches * ranks
        return replace(self, documents=documents, micro_batches=micro_batches, ranks=ranks)

    @cached_property
    def typical(self) -> Shape:
        """The mean shape of micro-batches."""
        return mean_shape(self.sizes)

    @cached_property
    def step_sizes(self) -> tuple[Typical, ...]:
        """The sizes by which all ranks together are timed: the largest of the micro-batches that they run at once.

        The other ranks wait for the largest: TRL gathers metrics in each micro-batch (``gather_for_metrics`` in
        ``compute_loss``, trl 1.16). Sizes that are almost never the largest count as the next larger size.
        """
        if self.ranks == 1:
            return self.sizes
        ascending = sorted(self.sizes, key=lambda size: (size.shape.tokens, size.shape.second_tokens))
        below = [share**self.ranks for share in accumulate((size.share for size in ascending), initial=0.0)]
        ends = [end for end in below[1:-1] if end >= _RARE]
        largest = ascending[len(ascending) - len(ends) - 1 :]
        return tuple(
            replace(size, share=end - start)
            for size, (start, end) in zip(largest, pairwise([0.0, *ends, below[-1]]), strict=True)
        )

    @property
    def tokens_per_step(self) -> float:
        """Dataset tokens of an optimizer step, over all processes."""
        return self.tokens * self.micro_batches * self.ranks

    @property
    def with_mask(self) -> BatchGeometry | None:
        """The geometry with :attr:`masked` as the worst micro-batch; None without one."""
        if self.masked is None:
            return None
        return replace(self, layout=Layout.PADDED, worst=self.masked, rivals=(), masked=None)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of all micro-batches that may need the most memory."""
        return (self.worst, *self.rivals)


def rounded_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``tokens``."""
    return -(-tokens // multiple) * multiple
