"""Chooses a few sizes of micro-batches whose weighted mean time is that of all, by Gaussian quadrature."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from autotune.core.rows.batch_geometry import Shape, Typical

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

_SPREADS = (0.05, 0.3, 0.6)
"""Standard deviations of the sizes, as shares of their mean, up to which one, two and three of them are chosen.

As a function of size, time is constant while launches bound it, and then grows with the tokens and, in attention, with
their square. With such functions (19 positions of the bend) and log-normal lengths, the mean over the chosen sizes is
off by 0.05 % in the median and 1.9 % in the 95th percentile, and by 0.1 % and 3.2 % with two and a known one.
"""
_MAX_WITH_KNOWN = 2
"""Maximum number of sizes in addition to a prescribed one; a third would lower the 3.2 % above to 2.1 %."""
MAX_REPRESENTATIVES = len(_SPREADS) + 1
"""Maximum number of sizes."""


def representatives(
    tokens: Any,
    shape: Callable[..., Shape],
    shares: Any = None,
    figures: Sequence[Any] = (),
    *,
    most: int = MAX_REPRESENTATIVES,
    most_tokens: float = inf,
    prescribed: float | None = None,
) -> tuple[Typical, ...]:
    """Return sizes that represent a distribution of sizes: one if they hardly differ, else up to four.

    These are the nodes of Gaussian quadrature for the distribution (Golub and Welsch, Calculation of Gauss Quadrature
    Rules, Math. Comp. 23 (1969)) in whole tokens, with weights that keep as many moments as there are nodes. From two
    nodes on, the mean of the sizes is exactly that of the distribution. So is the mean of each further figure: the
    weights divide the ascending sizes into successive quantiles, and each node lies in its own (theorem of Chebyshev,
    Markov and Stieltjes).

    Example: of sizes of 100 (three in four) and 500 tokens, both are chosen, with shares of 0.75 and 0.25.

    Args:
        tokens: the sizes, at least 1 each; not empty.
        shape: returns the shape of a size, given its tokens, a whole number, and the mean of each further figure over
            the micro-batches that it represents.
        shares: share of each size in the distribution; None: equal shares.
        figures: further figures of the micro-batches of each size.
        most: maximum number of sizes.
        most_tokens: upper bound of the sizes.
        prescribed: a size whose time is known, at least as large as all others. If the sizes differ, it is one of the
            result, with fewer others: the nodes are those of Gauss-Radau quadrature (Golub, Some Modified Matrix
            Eigenvalue Problems, SIAM Review 15 (1973)), which also keep the mean.
    """
    import numpy as np

    order = np.argsort(tokens, kind="stable")
    sizes = np.asarray(tokens, dtype=float)[order]
    weights = np.ones(len(sizes)) if shares is None else np.asarray(shares, dtype=float)[order]
    weights = weights / weights.sum()
    mean = float(weights @ sizes)
    spread = float(weights @ (sizes - mean) ** 2) ** 0.5
    fixed = None if prescribed is None or not spread else (prescribed - mean) / spread
    most = most if fixed is None else min(most, _MAX_WITH_KNOWN + 1)
    for count in range(min(most, bisect_left(_SPREADS, spread / mean) + 1), 1, -1):
        nodes = _nodes((sizes - mean) / spread, weights, count, fixed) * spread + mean
        largest = min(most_tokens, max(np.ceil(sizes[-1]), prescribed or 0.0))
        whole = np.unique(np.rint(nodes).clip(np.floor(sizes[0]), largest))
        chosen = _weights((sizes - mean) / spread, weights, (whole - mean) / spread)
        # After rounding, no positive weights may keep the moments if nodes are close together.
        if len(whole) > 1 and chosen.min() > 0:
            break
    else:
        whole, chosen = np.array([max(1.0, min(np.rint(mean), most_tokens))]), np.ones(1)
    means = [_by_quantile(np.asarray(figure, dtype=float)[order], weights, chosen) for figure in figures]
    return tuple(
        Typical(shape(int(size), *(each[place] for each in means)), float(share))
        for place, (size, share) in enumerate(zip(whole, chosen, strict=True))
    )


def distribution_of_sum(counts: Any, rows: int) -> tuple[Numbers, Numbers]:
    """Return the distribution of the sum of ``rows`` random sizes: sizes, and the share of each.

    Args:
        counts: number of each size, from 0 tokens on.
    """
    import numpy as np

    step = max(1, rows * len(counts) // _GRID)
    places, beyond = np.divmod(np.arange(len(counts)), step)
    single = np.zeros(len(counts) // step + 2)
    # A size between two points of the grid is divided between them, so that the mean stays.
    np.add.at(single, places, counts * (1 - beyond / step))
    np.add.at(single, places + 1, counts * beyond / step)
    length = rows * (len(single) - 1) + 1
    shares = np.fft.irfft(np.fft.rfft(single / single.sum(), length) ** rows, length)
    known = np.flatnonzero(shares > _NOISE)
    return known * step, shares[known]


_GRID = 1 << 14
"""Points of the grid of sums."""
_NOISE = 1e-12
"""Rounding error of the Fourier transforms, below which a share is zero."""


def _nodes(sizes: Numbers, weights: Numbers, count: int, fixed: float | None = None) -> Numbers:
    """Return the nodes of Gaussian quadrature: eigenvalues of the product with the size among polynomials.

    Args:
        fixed: a size that must be one of the nodes: the others are then the nodes of the smaller sizes, weighted with
            their distance from it.
    """
    import numpy as np

    if fixed is not None:
        return np.append(_nodes(sizes, weights * (fixed - sizes).clip(min=0.0), count - 1), fixed)
    degrees = np.arange(min(count, len(np.unique(sizes[weights > 0]))))
    basis, _ = np.linalg.qr(np.sqrt(weights)[:, None] * sizes[:, None] ** degrees)
    return np.asarray(np.linalg.eigvalsh(basis.T @ (sizes[:, None] * basis)))


def _weights(sizes: Numbers, weights: Numbers, nodes: Numbers) -> Numbers:
    """Return the weights of nodes with which the first moments, as many as nodes, are those of the distribution."""
    import numpy as np

    powers = range(len(nodes))
    moments = [weights @ sizes**power for power in powers]
    return np.asarray(np.linalg.solve([nodes**power for power in powers], moments))


def _by_quantile(figures: Numbers, weights: Numbers, shares: Numbers) -> list[float]:
    """Return the mean of figures in each of the successive quantiles with these shares."""
    import numpy as np

    ends, sums, bounds = (np.append(0.0, np.cumsum(each)) for each in (weights, weights * figures, shares))
    means: list[float] = (np.diff(np.interp(bounds, ends, sums)) / shares).tolist()
    return means
