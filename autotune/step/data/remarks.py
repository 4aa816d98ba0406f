"""Describes silent behaviour of a trainer on a dataset: columns left out, messages read as text, empty prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset

from autotune.step.rows import Counts
from autotune.trainers import Trainer
from autotune.units import counted

_MAX_NAMED = 5
"""Maximum number of columns that are named; the others are counted."""
# Messages as JSON, or in Python's notation, which pandas writes to CSV files.
_WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")


def remarks(trainer: Trainer, rows: Dataset, name: str, columns: Sequence[str], first_parts: Counts) -> Iterator[str]:
    """Yield one sentence per remark; only the first row is checked for messages written as text.

    Args:
        name: the user's name of the dataset.
        columns: the columns of its format.
        first_parts: tokens of each row's first part, which is its prompt if the model generates; shape (rows,).
    """
    first = rows[0]
    written = [column for column in columns if is_written_messages(first[column])]
    if written:
        yield (
            f"{name} has messages written as text in {' and '.join(written)}: TRL trains on this text as it is, "
            "without the chat template. To train on the messages, write the rows as JSON lines or Parquet."
        )
    # Reward functions are given all columns.
    read = {*columns, *trainer.optional_columns, *trainer.further_columns}
    unread = [] if trainer.scores else [column for column in rows.column_names if column not in read]
    if unread:
        more = f" and {len(unread) - _MAX_NAMED} more" if len(unread) > _MAX_NAMED else ""
        yield (
            f"{trainer.label} trains on {' and '.join(columns)} of {name}, and leaves out "
            f"{', '.join(unread[:_MAX_NAMED])}{more}."
        )
    empty = int((first_parts == 0).sum())
    if trainer.generates and empty:
        yield (
            f"{counted(empty, 'prompt')} of {name} {'has' if empty == 1 else 'have'} no token: training crashes where "
            "such prompts alone are generated from at once."
        )


def is_written_messages(value: Any) -> bool:
    """Whether a value is a list of messages written as text."""
    return isinstance(value, str) and _WRITTEN_MESSAGES.match(value) is not None
