"""Which rows a probe trains on, in which order: the worst micro-batch first, then batches as the trainer draws them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.core.measurement import Schedule
from autotune.step.rows import Counts, RowSizes

Amounts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepSize:
    """Rows of one optimizer step, fixed by the plan.

    Attributes:
        rows: per micro-batch (``per_device_train_batch_size``).
        micro_batches: per optimizer step (``gradient_accumulation_steps``).
    """

    rows: int
    micro_batches: int

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step."""
        return self.rows * self.micro_batches


@dataclass(frozen=True)
class Batches:
    """The rows that a probe trains on.

    Attributes:
        population: rows that the trainer iterates over in an epoch.
        order: indices of rows, one optimizer step after another; shape (steps, rows per step).
        worst: the rows of the largest micro-batch.
        worst_steps: how many steps at the beginning consist of it.
        tokens: dataset tokens of each step, padding excluded; shape (steps,).
        documents: dataset rows that each step holds; shape (steps,), not whole where rows of the dataset were split.
    """

    population: int
    order: Counts
    worst: Counts
    worst_steps: int
    tokens: Counts
    documents: Amounts


def plan_batches(sizes: RowSizes, step: StepSize, schedule: Schedule, seed: int, packed_from: int | None) -> Batches:
    """Return the batches of a probe.

    Args:
        sizes: of the rows that the trainer iterates over, after packing and dropping.
        seed: of the order of typical batches.
        packed_from: rows of the dataset that were packed into those of ``sizes``, or None when they were not packed.
    """
    typical_steps = schedule.warmup_steps + schedule.max_steps
    worst = worst_micro_batch(sizes, step.rows)
    worst_part = np.tile(worst, step.micro_batches * schedule.worst_steps)
    order = np.concatenate([worst_part, drawn(len(sizes.tokens), typical_steps * step.rows_per_step, seed)])
    order = order.reshape(-1, step.rows_per_step)
    return Batches(
        population=len(sizes.tokens),
        order=order,
        worst=worst,
        worst_steps=schedule.worst_steps,
        tokens=sizes.tokens[order].sum(axis=1),
        documents=documents_per_row(sizes, packed_from)[order].sum(axis=1),
    )


def worst_micro_batch(sizes: RowSizes, rows: int) -> Counts:
    """Return the indices of the longest rows, of equal ones those with the most trainable tokens.

    A dataset of fewer rows repeats them, as it does wherever a batch needs more.
    """
    longest_first = np.lexsort((-sizes.trainable, -sizes.tokens))
    return np.resize(longest_first[:rows], rows)


def drawn(population: int, count: int, seed: int) -> Counts:
    """Return ``count`` indices as a random sampler draws them: each once, in random order, then all over again."""
    generator = np.random.default_rng(seed)
    epochs = [generator.permutation(population) for _ in range(-(-count // population))]
    return np.concatenate(epochs)[:count]


def documents_per_row(sizes: RowSizes, packed_from: int | None) -> Amounts:
    """Return how many rows of the dataset each row of the trainer holds.

    Where packing split rows of the dataset, each part counts for its share, so that all together hold all of them.
    """
    if packed_from is None:
        return np.ones(len(sizes.tokens))
    parts = sizes.documents if sizes.documents is not None else sizes.tokens
    return np.asarray(parts * (packed_from / parts.sum()))
