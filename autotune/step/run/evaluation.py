"""Evaluates after the steps of a probe: the largest micro-batches first, then some of the loader's own, timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from autotune.core.blocks import block_rows
from autotune.core.program import EVALUATE
from autotune.step.rows import spread
from autotune.step.run.progress import Progress
from autotune.step.run.worst import worst_order
from autotune.step.trainers.base import Adapter

_TIMED = 8
"""Micro-batches that are timed, of all sizes; all where there are fewer."""


def evaluate(trainer: Any, known: Adapter, progress: Progress, ranks: int) -> float:
    """Evaluate as TRL does during training, which is a phase of its own, and return the seconds for all rows.

    The optimizer's state exists by then. The largest micro-batches are made of the longest rows, so none that the
    loader builds from neighbouring rows needs more.

    Args:
        ranks: processes that evaluate micro-batches of their own.
    """
    rows, count = trainer.eval_dataset, rows_at_once(trainer, known)
    copies = known.evaluation_drawing(trainer).copies
    with as_trained_on(trainer, count):
        sizes, collation = known.sizes(trainer), known.collation(trainer)
        worst = np.stack(worst_order(sizes, count, collation))
        # As the loader makes them, of neighbouring rows.
        blocks = block_rows(len(rows), count)
        tokens = collation.tokens(sizes, blocks)
        places = spread(tokens, _TIMED)
        sample = blocks[places]
        # Each for every rank: accelerate deals them out in turn (``BatchSamplerShard``), so that each gets its own.
        largest, timed = (
            known.arranged(
                trainer,
                order.repeat(copies, axis=1).repeat(ranks, axis=0),
                np.full(len(order) * ranks, fill_value=order is worst),
            )
            for order in (worst, sample)
        )
    with progress.inside(EVALUATE):
        trainer.eval_dataset = largest
        trainer.evaluate()
        trainer.eval_dataset = timed
        # It ends with the losses on the host, so the device is done.
        started = time.monotonic()
        trainer.evaluate()
        seconds = time.monotonic() - started
    trainer.eval_dataset = rows
    # A last micro-batch with fewer rows repeats them here.
    return float(seconds * tokens.sum() / tokens[places].sum() * len(rows) / blocks.size / ranks)


def rows_at_once(trainer: Any, known: Adapter) -> int:
    """Return the rows of the dataset in an evaluation's largest micro-batch."""
    return min(known.evaluation_drawing(trainer).rows, len(trainer.eval_dataset))


@contextmanager
def as_trained_on(trainer: Any, rows: int) -> Iterator[None]:
    """Have the rows to evaluate on in the place of those to train on, which adapters look at, so many at once."""
    with (
        mock.patch.object(trainer, "train_dataset", trainer.eval_dataset),
        mock.patch.object(trainer.args, "per_device_train_batch_size", rows),
    ):
        yield
