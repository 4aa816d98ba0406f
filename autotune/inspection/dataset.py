"""Resolves the user's dataset, a hub id or a local path, with fast checks only."""

from __future__ import annotations

import glob
import re
from dataclasses import replace
from pathlib import Path, PurePath

from autotune.core.files.text import COMPRESSIONS, uncompressed
from autotune.core.workload import DatasetSource
from autotune.errors import InputError, UnreadError
from autotune.inspection.paths import local_path, unreadable
from autotune.inspection.rows import check_lines, compression

BUILDERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
"""The builder of ``datasets.load_dataset`` for each suffix of a file."""

_TRAIN = "train"
_FORMATS_TEXT = f"{', '.join(BUILDERS)}, each also compressed ({', '.join(sorted(COMPRESSIONS))})"
_SUFFIXES = frozenset({*BUILDERS, *COMPRESSIONS})
# As datasets.splits.NamedSplit checks it.
_SPLIT = re.compile(r"\w+(\.\w+)*")
# Files of Dataset.save_to_disk and DatasetDict.save_to_disk. load_dataset refuses the first; of the second, datasets
# 4.8 loads state.json as rows, and 5.2 finds only splits named train, validation and test.
_SAVED_TO_DISK_FILES = {"state.json": InputError, "dataset_dict.json": UnreadError}


def builder_of(name: str | PurePath) -> str | None:
    """Return the builder of ``datasets`` for a file's suffix, or None."""
    return BUILDERS.get(uncompressed(name).suffix.lower())


def dataset_source(text: str | Path, split: str | None = None, config: str | None = None) -> DatasetSource:
    """Return the source of a dataset named by a file, a directory, or a hub id (not checked here).

    Args:
        split: the split to train on, or a part of it, such as ``train[:1000]``; None: ``train``.
        config: the configuration, if the dataset has several; None: the only one.

    Raises:
        InputError: the path does not exist, is empty or visibly broken, has an unsupported format, or is a file, which
            has no such split or configuration.
    """
    text, split = str(text), split or _TRAIN
    path = local_path(text, "dataset", _SUFFIXES)
    if path is None:
        return DatasetSource(name=text, path=text, split=split, config=config)
    try:
        if path.is_dir():
            _check_directory(path)
            return DatasetSource(name=text, path=str(path), split=split, config=config)
    except OSError as error:
        raise unreadable("dataset", text, error) from error
    builder = builder_of(path)
    if builder is None:
        raise InputError(f"{path} is in no format that autotune reads.", hint=f"It reads {_FORMATS_TEXT}.")
    if glob.has_magic(str(path)):
        raise InputError(f"{path} has one of * ? [ in its name.", hint="Rename it: datasets takes it for a pattern.")
    if split.partition("[")[0] != _TRAIN:
        raise InputError(f"{path} is a file, and has no split but {_TRAIN}.", hint="Name a file with those rows.")
    if config is not None:
        raise InputError(f"{path} is a file, and has no configurations.", hint="Leave out --dataset-config.")
    check_file(path)
    return DatasetSource(name=text, path=builder, data_files=str(path), split=split)


def training_source(dataset: str | Path | None, split: str | None, config: str | None = None) -> DatasetSource | None:
    """Return the source of the rows to train on; None without a dataset.

    Raises:
        InputError: the dataset cannot be used, or a split or configuration is named without one.
    """
    if dataset is not None:
        return dataset_source(dataset, split, config)
    for option, value in (("--split", split), ("--dataset-config", config)):
        if value is not None:
            raise InputError(f"{option} needs a dataset, and there is none.", hint="Give a DATASET.")
    return None


def evaluation_source(
    dataset: str | Path | None,
    evaluation: str | Path | None,
    split: str | None,
    trained: str | None = None,
    config: str | None = None,
) -> DatasetSource | None:
    """Return the source of the rows to evaluate on; None if neither ``evaluation`` nor ``split`` is given.

    Args:
        dataset: the dataset to train on.
        evaluation: the dataset to evaluate on; None: ``dataset``.
        split: the split to evaluate on; None: all rows of a file, else ``test``, as in TRL's ``ScriptArguments``.
        trained: the split of ``dataset`` to train on; None: ``train``.
        config: the configuration of both, if they have several; None: the only one.

    Raises:
        InputError: the dataset cannot be used, has no such split, or has the same rows as the training.
    """
    if evaluation is None and split is None:
        return None
    name = dataset if evaluation is None else evaluation
    if name is None:
        raise InputError("--eval-split needs a dataset, and there is none.", hint="Give a DATASET, or --eval-dataset.")
    if split is not None:
        check_split(split)
    rows = dataset_source(name, split, config)
    if rows.data_files is None:
        split = split or "test"
        rows = replace(rows, split=split, name=f"{rows.name} ({split})")
    if dataset is not None and rows == replace(dataset_source(dataset, trained, config), name=rows.name):
        raise InputError(
            f"Evaluation rows and training rows are the same: {rows.name}.",
            hint="Give other rows, or another split, such as --eval-split test.",
        )
    return rows


def check_split(split: str) -> None:
    """Check that a split is a name, which ``trl`` looks up in the loaded dataset.

    Raises:
        InputError: it is something else, such as ``train[:1000]``.
    """
    if not _SPLIT.fullmatch(split):
        raise InputError(
            f"{split!r} is not the name of a split.",
            hint="With dataset_name or an evaluation, `trl` takes whole splits only, such as test or validation; an "
            "entry of datasets takes a part, such as split: train[:1000].",
        )


def check_one_load(rows: DatasetSource, evaluation: DatasetSource) -> None:
    """Check that one call of ``load_dataset``, as ``trl`` makes it, can load training and evaluation rows.

    Raises:
        InputError: they are neither whole splits of one dataset, nor two files of one format.
    """
    check_split(rows.split)
    if rows.path != evaluation.path or (rows.data_files is None) != (evaluation.data_files is None):
        raise InputError(
            f"`trl` cannot load {rows.name} to train on and {evaluation.name} to evaluate on.",
            hint="It loads both in one call: give a split of one dataset (--eval-split), or two files of one format.",
        )


def _check_directory(directory: Path) -> None:
    saved = next((kind for name, kind in _SAVED_TO_DISK_FILES.items() if (directory / name).is_file()), None)
    if saved is not None:
        raise saved(
            f"{directory} was written by save_to_disk, for load_from_disk of datasets: `trl` calls load_dataset, which "
            "refuses it, or guesses its files and splits.",
            hint="Write it with Dataset.to_parquet instead.",
        )


def check_file(file: Path, *, lines: bool = False) -> None:
    """Check that a file is not empty, and can be decompressed here.

    Args:
        lines: whether to check every line of a JSON file.

    Raises:
        InputError: it is empty or broken.
    """
    try:
        if file.stat().st_size == 0:
            raise InputError(f"{file} is empty.", hint="Give a dataset that has rows.")
        if compression(file) is None and lines and builder_of(file) == "json":
            check_lines(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}.") from error
