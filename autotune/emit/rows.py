"""The training rows that the bundle's configuration names: the user's own, or a copy cut to a length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload
from autotune.emit.files import written
from autotune.trainers import Trainer

if TYPE_CHECKING:
    import pyarrow as pa

CUT_ROWS = "rows.parquet"


@dataclass(frozen=True)
class TrainingRows:
    """The location of the rows, with the fields of an item of ``datasets:`` in TRL's configuration.

    Attributes:
        in_bundle: whether the file was made for the bundle, and moves with it.
    """

    path: str
    split: str
    data_files: str | None = None
    in_bundle: bool = False

    def entry(self) -> dict[str, str]:
        """Return the item of ``datasets:``."""
        files = {"data_files": self.data_files} if self.data_files is not None else {}
        return {"path": self.path, **files, "split": self.split}


def training_rows(workload: Workload, plan: TrainingPlan, directory: Path) -> TrainingRows:
    """Return where a plan's rows are: the user's dataset, or the file of cut rows in the bundle's directory."""
    if cut_length(workload, plan) is not None:
        return TrainingRows("parquet", "train", str(directory.absolute() / CUT_ROWS), in_bundle=True)
    source = workload.dataset_source
    return TrainingRows(source.path, source.split, source.data_files)


def cut_length(workload: Workload, plan: TrainingPlan) -> int | None:
    """Return the tokens to which rows have to be cut before the trainer sees them; None where none is longer."""
    longest = workload.dataset.lengths.longest
    return plan.truncate_to if plan.truncate_to is not None and longest > plan.truncate_to else None


def write_cut_rows(trainer: Trainer, tokenized_directory: Path, truncate_to: int, file: Path) -> int:
    """Write the tokenised rows, cut to so many tokens from the start, as Parquet; return the number of rows.

    Args:
        trainer: the trainer whose way of cutting rows is applied.
        tokenized_directory: a directory written by ``datasets.Dataset.save_to_disk``.
        truncate_to: tokens to keep.
        file: where to write.

    Raises:
        InputError: the file cannot be written, or the disk is full.
    """
    import pyarrow.parquet as pq

    rows = 0
    with written(file) as part:
        writer = None
        for batch in _batches(tokenized_directory):
            cut = trainer.cut_rows(batch, truncate_to)
            writer = writer or pq.ParquetWriter(part, cut.schema)
            writer.write_batch(cut)
            rows += cut.num_rows
        if writer is not None:
            writer.close()
    return rows


def _batches(tokenized_directory: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    state = json.loads((tokenized_directory / "state.json").read_text(encoding="utf-8"))
    for data_file in state["_data_files"]:
        with pa.memory_map(str(tokenized_directory / data_file["filename"])) as source:
            yield from pa.ipc.open_stream(source)
