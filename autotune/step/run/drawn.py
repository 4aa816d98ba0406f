"""Draws the rows of typical micro-batches: at random, or as a sample that is stratified by size."""

from __future__ import annotations

import numpy as np

from autotune.core.blocks import block_rows
from autotune.step.rows import Counts, RowSizes
from autotune.step.trainers.base import Collation

_DRAWN_FOR_ONE = 8
"""Number of micro-batches drawn per typical one that is kept."""


def drawn(population: int, count: int, seed: int) -> Counts:
    """Return ``count`` indices in the order of a random sampler: random permutations, one epoch after another."""
    generator = np.random.default_rng(seed)
    epochs = [generator.permutation(population) for _ in range(-(-count // population))]
    return np.concatenate(epochs)[:count]


def drawn_batches(population: int, rows: int, count: int, seed: int, *, blocks: bool) -> Counts:
    """Return the rows of ``count`` micro-batches in random order; shape (count, rows).

    Args:
        blocks: whether micro-batches are blocks of successive rows. A last block with fewer rows is left out.
    """
    if not blocks:
        return drawn(population, count * rows, seed).reshape(-1, rows)
    whole = max(1, population // rows)
    return np.asarray(block_rows(population, rows)[drawn(whole, count, seed)])


def stratified(sizes: RowSizes, rows: int, count: int, strata: int, collation: Collation, seed: int) -> Counts:
    """Return at least ``count`` micro-batches in rounds, each with one micro-batch from every stratum by size."""
    generator = np.random.default_rng(seed)
    rounds = -(-count // strata)
    many = drawn_batches(len(sizes.tokens), rows, rounds * strata * _DRAWN_FOR_ONE, seed, blocks=collation.blocks)
    taken = []
    for micro_batches in many.reshape(rounds, -1, rows):
        by_size = np.argsort(collation.tokens(sizes, micro_batches), kind="stable").reshape(strata, -1)
        picked = by_size[np.arange(strata), generator.integers(_DRAWN_FOR_ONE, size=strata)]
        taken.append(micro_batches[generator.permutation(picked)])
    return np.concatenate(taken)[:count]
