"""Chooses the micro-batch shapes to trace so that all other shapes of a layout can be extrapolated from them."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape
from autotune.planning.extrapolation.shape import Anchors, Basis

LONGEST_FLAT = 8192
"""Tokens of the longest row that is traced in the flat layout: tracing computes a real attention mask over the row, and
its memory and time grow with the square of the tokens."""
_TOKENS_STEP = 128
# Tokens that TRL's fused head processes at once (TOKEN_CHUNK_SIZE of trl/kernels/chunked_logprob.py).
_CHUNK_TOKENS = 4096


def anchors(layout: Layout, geometries: Iterable[BatchGeometry]) -> Anchors:
    """Return the shapes to trace so that the shapes of the geometries can be extrapolated from them."""
    chosen = [geometry for geometry in geometries if geometry.layout is layout]
    shapes = {shape for geometry in chosen for shape in (geometry.worst, geometry.typical)}
    shapes |= {shape for geometry in chosen for item in geometry.apart for shape in (item.worst, item.typical)}
    # The head sees the tokens of all sequences of a row.
    chunk_tokens = _CHUNK_TOKENS // chosen[0].sequences
    most_tokens = round(max(shape.rows * shape.tokens for shape in shapes))
    if layout is Layout.FLAT:
        step = max(_TOKENS_STEP, min(chunk_tokens, most_tokens) // 4 // _TOKENS_STEP * _TOKENS_STEP)
        known = tuple(Shape(1, step * times) for times in (1, 2, 4))
        beyond = Shape(1, min(most_tokens, LONGEST_FLAT)) if most_tokens > chunk_tokens else None
        return Anchors(Basis.TOKENS, known, chunk_tokens, beyond)
    few = 1 if layout is Layout.EQUAL or chosen[0].sequences > 1 else 2
    by_tokens = sorted(shapes, key=lambda shape: shape.tokens)
    widest, narrowest = by_tokens[-1], by_tokens[0]
    longest, shortest = round(widest.tokens), max(1, round(narrowest.tokens / 8) * 8)
    most = max(few + 1, *(shape.rows for shape in shapes))
    whole = chunk_tokens // longest
    fitting = min(most, whole) if whole > few else most
    at_longest = (_like(widest, few, longest), _like(widest, fitting, longest))
    # If even the fewest rows have more tokens than one chunk, every shape is computed in chunks.
    chunked = fitting < most
    limits = (float(fitting * longest), _like(widest, most, longest)) if chunked else (inf, None)
    if longest == round(narrowest.tokens):
        return Anchors(Basis.ROWS, at_longest, *limits)
    shortest = shortest if shortest < longest else max(1, longest // 2)
    return Anchors(Basis.TOKENS, (*at_longest, _like(narrowest, few, shortest)), *limits)


def _like(shape: Shape, rows: int, tokens: int) -> Shape:
    """Return a shape of other sizes in which the same share of tokens is generated, in whole tokens."""
    generated = round(shape.generated * tokens / shape.tokens)
    return Shape(rows, tokens, min(tokens - 1, max(1, generated)) if shape.generated else 0)
