"""The terms of a micro-batch shape that memory and time are linear in, and the weights that extrapolate shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from autotune.core.batch_geometry import Shape


class Basis(StrEnum):
    """The terms that figures of a kind of micro-batch are linear in."""

    CONSTANT = "a constant"
    ROWS = "a constant, and rows"
    TOKENS = "a constant, tokens, and tokens by length"
    GENERATED = "a constant, generated tokens of a row, and these by the tokens of all rows"
    BOTH = "a constant, and for each of two tensors its tokens, and tokens by length"

    @property
    def size(self) -> int:
        """Number of terms, and so of shapes that have to be known."""
        return len(self.terms(Shape(1, 1, 1)))

    def terms(self, shape: Shape) -> tuple[float, ...]:
        """Return the values of the terms at a shape."""
        if self is Basis.CONSTANT:
            return (1.0,)
        if self is Basis.ROWS:
            return (1.0, float(shape.rows))
        every = shape.rows * shape.tokens
        if self is Basis.TOKENS:
            return (1.0, every, every * shape.tokens)
        if self is Basis.GENERATED:
            # Each token reads the weights once for all rows, and the keys and values of each of them.
            return (1.0, shape.generated, shape.generated * every)
        beside = shape.rows * shape.beside
        return (1.0, every, every * shape.tokens, beside, beside * shape.beside)


def shape_weights(basis: Basis, known: Sequence[Shape], wanted: Shape) -> tuple[float, ...]:
    """Return the weight of each known shape in the figures at the wanted shape.

    Raises:
        ValueError: the known shapes do not determine it.
    """
    columns = [basis.terms(shape) for shape in known]
    rows = [[column[term] for column in columns] for term in range(basis.size)]
    return _solve(rows, list(basis.terms(wanted)))


@dataclass(frozen=True)
class Anchors:
    """The shapes at which micro-batches of a kind are traced, and the weights for extrapolating to other shapes.

    Up to ``whole_tokens``, figures are linear in the terms of ``basis``. Beyond, where the loss is computed in chunks,
    the deviation from that is measured at the shape ``beyond`` and scaled with the tokens above ``whole_tokens``.

    Example: with the basis ``ROWS`` and the shapes 1 x 512 and 4 x 512, the figure at 2 x 512 is 2/3 of the first plus
    1/3 of the second.

    Attributes:
        basis: the terms that figures are linear in, for micro-batches whose loss is computed at once.
        shapes: the traced shapes, as many as the basis has terms.
        whole_tokens: tokens of a micro-batch up to which figures are linear.
        beyond: a traced shape of more tokens than that, or None if no micro-batch has more.
        alone: whether figures are known at the traced shapes only.
    """

    basis: Basis
    shapes: tuple[Shape, ...]
    whole_tokens: float = inf
    beyond: Shape | None = None
    alone: bool = False

    def covers(self, wanted: Shape) -> bool:
        """Return whether figures at a shape follow from those at the traced ones."""
        return not self.alone or wanted in self.shapes

    def sums(self, wanted: Shape, *, generating: bool = False) -> dict[Shape, float]:
        """Return the weight of each traced shape in the linear part of the figures at the wanted shape.

        Args:
            generating: whether it is the time of generating completions, token by token.
        """
        lengths = {shape.generated for shape in self.shapes}
        basis = Basis.GENERATED if generating and self.basis is Basis.TOKENS and len(lengths) > 1 else self.basis
        return dict(zip(self.shapes, shape_weights(basis, self.shapes, wanted), strict=True))

    def excess(self, wanted: Shape) -> float:
        """Return how far the wanted shape exceeds ``whole_tokens``: 0 up to there, 1 at the shape ``beyond``."""
        if self.beyond is None:
            return 0.0
        tokens = wanted.rows * wanted.tokens - self.whole_tokens
        return max(0.0, tokens / (self.beyond.rows * self.beyond.tokens - self.whole_tokens))


def layer_weights(known: Sequence[int], wanted: int) -> tuple[float, ...]:
    """Return the weights of one or two known depths in the figures at the wanted depth, which are affine in layers.

    Raises:
        ValueError: a single depth is known, and it is not the wanted one.
    """
    if len(known) == 1:
        if known[0] != wanted:
            raise ValueError(f"{wanted} layers do not follow from {known[0]}")
        return (1.0,)
    short, long = known
    share = (wanted - short) / (long - short)
    return (1.0 - share, share)


def _solve(rows: list[list[float]], right: list[float]) -> tuple[float, ...]:
    """Solve a small linear system by Gaussian elimination with pivoting."""
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
