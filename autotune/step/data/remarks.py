"""Describes silent behaviour of a trainer on a dataset: columns left out, messages read as text, rows dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from autotune.step.rows import Counts
from autotune.techniques.padding_free import DOCUMENT_LENGTHS
from autotune.trainers.base import Trainer
from autotune.trainers.declared import DatasetFormat
from autotune.units import plural

_MAX_NAMED = 5
"""Maximum number of columns, or of values, that are named."""
# Messages as JSON, or in Python's notation, which pandas writes to CSV files.
_WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")


def remarks(
    trainer: Trainer, rows: Dataset, form: DatasetFormat, name: str, first_parts: Counts, unkept: int
) -> Iterator[str]:
    """Yield one sentence per remark; only the first row is checked for messages written as text.

    Args:
        form: the format of the rows.
        name: the user's name of the dataset.
        first_parts: tokens of each row's first part, which is its prompt if the model generates; shape (rows,).
        unkept: number of rows that no maximum length keeps.
    """
    yield from _of_columns(trainer, rows, form, name)
    empty = int((first_parts == 0).sum())
    if trainer.generates and empty:
        yield (
            f"{plural(empty, 'prompt')} of {name} {'has' if empty == 1 else 'have'} no token: training crashes where "
            "such prompts alone are generated from at once."
        )
    if unkept:
        yield (
            f"{plural(unkept, 'row')} of {name} {'has' if unkept == 1 else 'have'} no token that the loss counts: TRL "
            "drops such rows, unless it packs or max_length is null."
        )
    for flag in form.flags:
        others = sorted({*rows.unique(flag)} - {False, True})
        if others:
            values = ", ".join(map(str, others[:_MAX_NAMED]))
            yield f"{name} has {values} as {flag}: {trainer.label} takes every number but 0 for true."


def _of_columns(trainer: Trainer, rows: Dataset, form: DatasetFormat, name: str) -> Iterator[str]:
    """Yield the remarks on columns: those with messages as text, those left out, and the documents of packed rows."""
    first, columns = rows[0], form.columns
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
    if DOCUMENT_LENGTHS in read.intersection(rows.column_names):
        yield (
            f"{name} has {DOCUMENT_LENGTHS}: TRL keeps the documents of a row apart only with padding_free and without "
            "packing. A plan takes each row for one document."
        )


def is_written_messages(value: Any) -> bool:
    """Whether a value is a list of messages written as text."""
    return isinstance(value, str) and _WRITTEN_MESSAGES.match(value) is not None
