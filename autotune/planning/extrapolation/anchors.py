"""Chooses the micro-batch shapes to trace so that all other shapes of a layout can be extrapolated from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf, lcm

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape, rounded_up
from autotune.planning.extrapolation.shape import Anchors, Basis

LONGEST_FLAT = 8192
"""Tokens of the longest row that is traced in the flat layout: tracing computes a real attention mask over the row, and
its memory and time grow with the square of the tokens."""
_TOKENS_STEP = 128
_SHORTEST_STEP = 8
# Tokens that TRL's fused head processes at once (TOKEN_CHUNK_SIZE of trl/kernels/chunked_logprob.py).
_CHUNK_TOKENS = 4096
# Tokens of the shortest rows whose mismatched pairs can be narrower and wider than they are.
_FEWEST_MISMATCHED = 4


def anchors(layout: Layout, geometries: Iterable[BatchGeometry], split: int = 1) -> Anchors:
    """Return the shapes to trace so that the shapes of the geometries can be extrapolated from them.

    Args:
        split: ranks that share each row; the row then consists of twice as many equal pieces, two for each rank.
    """
    chosen = [geometry for geometry in geometries if geometry.layout is layout]
    shapes = {shape for geometry in chosen for shape in (*geometry.shapes, geometry.typical)}
    shapes |= {shape for geometry in chosen for item in geometry.apart for shape in (item.worst, item.typical)}
    if layout is not Layout.FLAT and (themselves := _themselves(shapes, split)) is not None:
        return themselves
    # The head sees the tokens of all sequences of a row that a rank has.
    chunk_tokens = _CHUNK_TOKENS * split // chosen[0].sequences
    multiple = 2 * split if split > 1 else 1
    most_tokens = round(max(shape.rows * shape.tokens for shape in shapes))
    if layout is Layout.FLAT:
        step = max(_TOKENS_STEP, min(chunk_tokens, most_tokens) // 4 // _TOKENS_STEP * _TOKENS_STEP)
        known = tuple(Shape(1, step * times) for times in (1, 2, 4))
        beyond = Shape(1, min(most_tokens, LONGEST_FLAT)) if most_tokens > chunk_tokens else None
        return Anchors(Basis.TOKENS, known, chunk_tokens, beyond)
    # Pairs are mismatched between rows, of which it takes two.
    single = (layout is Layout.EQUAL or chosen[0].sequences > 1) and not any(shape.beside for shape in shapes)
    few = 1 if single else 2
    by_tokens = sorted(shapes, key=lambda shape: shape.tokens)
    widest, narrowest = by_tokens[-1], by_tokens[0]
    step = lcm(_SHORTEST_STEP, multiple)
    longest = rounded_up(round(widest.tokens), multiple)
    shortest = max(multiple, round(narrowest.tokens / step) * step)
    most = max(few + 1, *(shape.rows for shape in shapes))
    beside = _beside(shapes, longest)
    whole = chunk_tokens // max((longest, *beside))
    fitting = min(most, whole) if whole > few else most
    second = longest if beside else 0
    at_longest = (_like(widest, few, longest, second), _like(widest, fitting, longest, second))
    # If even the fewest rows have more tokens than one chunk, every shape is computed in chunks.
    chunked = fitting < most
    limits = (float(fitting * longest), _like(widest, most, longest, second)) if chunked else (inf, None)
    shortest = shortest if shortest < longest else max(multiple, longest // 2 // multiple * multiple)
    if beside:
        others = (Shape(few, shortest, beside=shortest), *(Shape(few, longest, beside=width) for width in beside))
        return Anchors(Basis.BOTH, (*at_longest, *others), *limits)
    if shortest == longest or longest == rounded_up(round(narrowest.tokens), multiple):
        return Anchors(Basis.ROWS, at_longest, *limits)
    return Anchors(Basis.TOKENS, (*at_longest, _like(narrowest, few, shortest)), *limits)


def _themselves(shapes: Collection[Shape], split: int) -> Anchors | None:
    """Return the shapes themselves if there are no more than would be traced to extrapolate to them, else None."""
    rows, tokens = sorted(shape.rows for shape in shapes), {shape.tokens for shape in shapes}
    alike = len({(shape.tokens, shape.generated, shape.beside) for shape in shapes}) == 1
    whole = all(size % 1 == 0 and size % (2 * split if split > 1 else 1) == 0 for size in tokens)
    if len(rows) > Basis.ROWS.size or not alike or not whole:
        return None
    known = tuple(sorted(shapes))
    return Anchors(Basis.CONSTANT if len(known) == 1 else Basis.ROWS, known, alone=True)


def _like(shape: Shape, rows: int, tokens: int, beside: float = 0) -> Shape:
    """Return a shape of other sizes in which the same share of tokens is generated, in whole tokens."""
    generated = round(shape.generated * tokens / shape.tokens)
    return Shape(rows, tokens, min(tokens - 1, max(1, generated)) if shape.generated else 0, beside)


def _beside(shapes: Iterable[Shape], longest: int) -> tuple[int, ...]:
    """Return two widths of the second tensor to trace beside the longest first one; none where they are not needed.

    Mismatched pairs of rows can be about half as wide as the rows, up to twice as wide.
    """
    widths = [shape.beside for shape in shapes if shape.beside not in (0, shape.tokens)]
    if not widths or longest < _FEWEST_MISMATCHED:
        return ()
    narrow = min(longest - 1, max(longest // 2 + 2, min(longest * 3 // 4, round(min(widths)))))
    wide = min(2 * longest - 2, max(longest * 5 // 4, round(max(widths))))
    return narrow, wide
