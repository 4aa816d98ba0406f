"""Locates the training rows of a bundle's configuration: the user's own, or a copy, which it writes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.files.yaml_text import yaml_text
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetSource, Workload
from autotune.emit.files import remove, write_text, written
from autotune.trainers import find_trainer
from autotune.trainers.base import Trainer

if TYPE_CHECKING:
    import pyarrow as pa

COPIED_ROWS = "rows.parquet"
BOTH_ROWS = "data"
"""Directory of the bundle for training and evaluation rows, which ``trl`` loads with one call of
``datasets.load_dataset``. It holds either copied rows or a dataset card with the paths of the files."""
_TRAIN, _TEST = "train", "test"
_BOTH_COPIED = (f"{BOTH_ROWS}/{_TRAIN}.parquet", f"{BOTH_ROWS}/{_TEST}.parquet")
_CARD = f"{BOTH_ROWS}/README.md"
FILES = (COPIED_ROWS, *_BOTH_COPIED, _CARD)
"""The files of rows that a bundle may have."""
ROW_ARGUMENTS = (
    "datasets", "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming",
    "streaming", "test_split_size",
)  # fmt: skip
"""Arguments of ``trl`` that select the rows to train on, and how they are loaded."""


@dataclass(frozen=True)
class TrainingRows:
    """The location of the rows, in the terms of ``datasets.load_dataset``.

    Attributes:
        in_bundle: name of the bundle's file or directory with the rows; empty for rows outside of the bundle.
        cut: whether they are tokenised and cut.
        evaluated: the split to evaluate on; None without evaluation.
        config: the configuration, where the dataset has several; None: the only one.
        test_size: ``test_split_size``, by which TRL splits random rows off to evaluate on; None: it splits none off.
    """

    path: str
    split: str
    data_files: str | None = None
    in_bundle: str = ""
    cut: bool = False
    evaluated: str | None = None
    config: str | None = None
    test_size: object = None

    def arguments(self) -> dict[str, object]:
        """Return the arguments of ``trl`` that name the rows: only ``dataset_name`` has a split to evaluate on."""
        if self.evaluated is not None:
            config = {"dataset_config": self.config} if self.config is not None else {}
            splits = {"dataset_train_split": self.split, "dataset_test_split": self.evaluated}
            return {"dataset_name": self.path, **config, **splits}
        split_off = {"test_split_size": self.test_size} if self.test_size is not None else {}
        return {"datasets": [self.entry(self.split)], **split_off}

    def entry(self, split: str) -> dict[str, str]:
        """Return the arguments of ``datasets.load_dataset`` for a split."""
        config = {"name": self.config} if self.config is not None else {}
        files = {"data_files": self.data_files} if self.data_files is not None else {}
        return {"path": self.path, **config, **files, "split": split}

    @property
    def place(self) -> str:
        """The path of the file or directory that they are loaded from."""
        return self.data_files if self.data_files is not None else self.path


def training_rows(workload: Workload, plan: TrainingPlan, directory: Path) -> TrainingRows:
    """Return the location of a plan's rows: the user's dataset, or its copy in the bundle's directory."""
    source, evaluation, here = workload.dataset_source, workload.evaluation_source, directory.absolute()
    cut, copied, size = cut_length(workload, plan) is not None, copies_rows(workload, plan), source.test_size
    if evaluation is None or not plan.evaluates or size is not None:
        if copied:
            return TrainingRows("parquet", _TRAIN, str(here / COPIED_ROWS), COPIED_ROWS, cut, test_size=size)
        return TrainingRows(source.path, source.split, source.data_files, config=source.config, test_size=size)
    if copied or source.data_files is not None:
        return TrainingRows(str(here / BOTH_ROWS), _TRAIN, in_bundle=BOTH_ROWS, cut=cut, evaluated=_TEST)
    return TrainingRows(source.path, source.split, evaluated=evaluation.split, config=source.config)


def write_rows(workload: Workload, plan: TrainingPlan, directory: Path) -> TrainingRows:
    """Write the bundle's files for a plan's rows, remove files of other rows, and return the rows' location.

    Raises:
        InputError: a file cannot be written, or the disk is full.
    """
    rows = training_rows(workload, plan, directory)
    files: tuple[str, ...] = ()
    if copies_rows(workload, plan):
        files = (COPIED_ROWS,) if rows.evaluated is None else _BOTH_COPIED
        # The rows to evaluate on, if there are any, come second.
        for name, profile in zip(files, workload.profiles, strict=False):
            tokenized = Path(profile.tokenized_directory)
            write_copied_rows(find_trainer(plan.trainer), tokenized, cut_length(workload, plan), directory / name)
    elif rows.in_bundle and workload.evaluation_source is not None:
        write_text(directory / _CARD, _card({_TRAIN: workload.dataset_source, _TEST: workload.evaluation_source}))
        files = (_CARD,)
    remove_rows(directory, files)
    return rows


def remove_rows(directory: Path, keep: Collection[str] = ()) -> None:
    """Remove the files of rows from a bundle.

    Args:
        keep: those of :data:`FILES` that stay.

    Raises:
        InputError: a file cannot be removed.
    """
    for name in FILES:
        if name not in keep:
            remove(directory / name)


def _card(files: Mapping[str, DatasetSource]) -> str:
    """Return the dataset card that names the file of each split, as ``datasets`` reads it."""
    listed = [{"split": split, "path": source.data_files} for split, source in files.items()]
    document = {"configs": [{"config_name": "default", "data_files": listed}]}
    return f"---\n{yaml_text(document)}---\n"


def cut_length(workload: Workload, plan: TrainingPlan) -> int | None:
    """Return the length in tokens to which rows must be cut beforehand; None if no row is longer."""
    longest = max(profile.lengths.longest for profile in workload.profiles)
    return plan.truncate_to if plan.truncate_to is not None and longest > plan.truncate_to else None


def copies_rows(workload: Workload, plan: TrainingPlan) -> bool:
    """Return whether a bundle has a copy of the rows, cut or with rows dropped."""
    return cut_length(workload, plan) is not None or any(profile.dropped for profile in workload.profiles)


def write_copied_rows(trainer: Trainer, tokenized_directory: Path, truncate_to: int | None, file: Path) -> None:
    """Write tokenised rows, cut to a length, or the user's rows unchanged, as Parquet.

    Args:
        trainer: the trainer that defines the cut.
        tokenized_directory: a directory written by ``datasets.Dataset.save_to_disk``.
        truncate_to: tokens to keep; None: rows stay uncut, without the columns that tokenising added.
        file: output file.

    Raises:
        InputError: the file cannot be written, or the disk is full.
    """
    import pyarrow.parquet as pq

    with written(file) as part:
        writer = None
        for batch in _batches(tokenized_directory):
            copy = trainer.copied_rows(batch, truncate_to)
            writer = writer or pq.ParquetWriter(part, copy.schema)
            writer.write_batch(copy)
        if writer is not None:
            writer.close()


def _batches(tokenized_directory: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    state = json.loads((tokenized_directory / "state.json").read_text(encoding="utf-8"))
    for data_file in state["_data_files"]:
        with pa.memory_map(str(tokenized_directory / data_file["filename"])) as source:
            yield from pa.ipc.open_stream(source)
