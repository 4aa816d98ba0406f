"""The sizes of a step that memory and time depend on, and how a figure at one size follows from figures at others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from autotune.core.batch_geometry import Shape


class Basis(StrEnum):
    """What figures of a kind of micro-batch are sums of."""

    CONSTANT = "a constant"
    ROWS = "a constant, and rows"
    TOKENS = "a constant, tokens, and tokens by length"

    @property
    def size(self) -> int:
        """How many shapes have to be known."""
        return len(self.terms(Shape(1, 1)))

    def terms(self, shape: Shape) -> tuple[float, ...]:
        """Return the terms of a shape."""
        if self is Basis.CONSTANT:
            return (1.0,)
        if self is Basis.ROWS:
            return (1.0, float(shape.rows))
        every = shape.rows * shape.tokens
        return (1.0, every, every * shape.tokens)


def shape_weights(basis: Basis, known: Sequence[Shape], wanted: Shape) -> tuple[float, ...]:
    """Return the weight of each known shape's figures in those of the wanted one.

    Raises:
        ValueError: the known shapes do not determine it.
    """
    columns = [basis.terms(shape) for shape in known]
    rows = [[column[term] for column in columns] for term in range(basis.size)]
    return _solve(rows, list(basis.terms(wanted)))


@dataclass(frozen=True)
class Anchors:
    """The shapes at which micro-batches of a kind are traced, and how figures at others follow from those.

    Attributes:
        basis: what figures are sums of, up to so many tokens as the loss is computed on at once.
        shapes: that determine the sums.
        whole_tokens: so many tokens of a micro-batch.
        beyond: a shape of more tokens, where there are such micro-batches: beyond those, what the sums give is off by
            what it is off by here, in proportion to the tokens in excess.
    """

    basis: Basis
    shapes: tuple[Shape, ...]
    whole_tokens: float = inf
    beyond: Shape | None = None

    def sums(self, wanted: Shape) -> dict[Shape, float]:
        """Return the weight of each known shape's figures in the sums for the wanted one."""
        return dict(zip(self.shapes, shape_weights(self.basis, self.shapes, wanted), strict=True))

    def excess(self, wanted: Shape) -> float:
        """Return how far the wanted shape lies beyond the whole tokens: 0 up to those, 1 at the shape beyond."""
        if self.beyond is None:
            return 0.0
        tokens = wanted.rows * wanted.tokens - self.whole_tokens
        return max(0.0, tokens / (self.beyond.rows * self.beyond.tokens - self.whole_tokens))


def layer_weights(known: Sequence[int], wanted: int) -> tuple[float, ...]:
    """Return the weights of the figures at one or two depths in those at the wanted one: figures are affine in layers.

    Raises:
        ValueError: a single depth is known, and it is another one.
    """
    if len(known) == 1:
        if known[0] != wanted:
            raise ValueError(f"{wanted} layers do not follow from {known[0]}")
        return (1.0,)
    short, long = known
    share = (wanted - short) / (long - short)
    return (1.0 - share, share)


def _solve(rows: list[list[float]], right: list[float]) -> tuple[float, ...]:
    """Solve a small linear system by Gauss's elimination with pivots."""
    size = len(rows)
    table = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(table[row][column]))
        if table[pivot][column] == 0:
            raise ValueError("the shapes do not determine the figures")
        table[column], table[pivot] = table[pivot], table[column]
        for row in range(size):
            if row != column:
                factor = table[row][column] / table[column][column]
                table[row] = [value - factor * other for value, other in zip(table[row], table[column], strict=True)]
    return tuple(table[row][size] / table[row][row] for row in range(size))
