"""``autotune.lengths``: the distribution of a dataset's token lengths."""

from __future__ import annotations

from autotune.app.lengths import lengths as read_lengths
from autotune.core.events import Listener, ignore
from autotune.core.length_report import LengthReport
from autotune.trainers import DEFAULT


def lengths(model: str, dataset: str, *, trainer: str = DEFAULT, listener: Listener = ignore) -> LengthReport:
    """Tokenise a dataset as the trainer would, and return the distribution of its lengths.

    Args:
        model: hub id, local directory or ``config.json``; its tokenizer and chat template are used.
        dataset: hub id, or a local file or directory.
        trainer: whose dataset formats are understood.
        listener: receives the events of the run.

    Raises:
        InputError: the model or the dataset cannot be used.
    """
    return read_lengths(model, dataset, trainer, listener)
