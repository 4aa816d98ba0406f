"""Finds the dataset that a user named on disk, with fast checks only."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import replace
from pathlib import Path, PurePath

from autotune.core.text import COMPRESSIONS, uncompressed
from autotune.core.workload import DatasetSource
from autotune.errors import InputError, UnreadError
from autotune.inspection.paths import local_path, unreadable
from autotune.inspection.rows import CHECKED_BYTES, check_json, compression

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""From the suffix of a file to the builder of ``datasets.load_dataset`` that reads it."""

_TRAIN = "train"
_UNDERSTOOD = f"{', '.join(BUILDERS)}, each also compressed ({', '.join(sorted(COMPRESSIONS))})"
_SUFFIXES = frozenset({*BUILDERS, *COMPRESSIONS})
# The first and last four bytes of every file; four bytes of footer length are between (Apache Parquet, File Format).
_PARQUET_MAGIC = b"PAR1"
_SMALLEST_PARQUET_BYTES = 12
# As datasets.splits.NamedSplit checks it.
_SPLIT = re.compile(r"\w+(\.\w+)*")
# Written by Dataset.save_to_disk, whose directories load_dataset refuses, and by DatasetDict.save_to_disk: of these,
# datasets 4.8 takes state.json for the rows, and 5.2 the splits train, validation and test alone for what they are.
_SAVED_TO_DISK_FILES = ("state.json", "dataset_dict.json")
# The card of a dataset (datasets.config.REPOCARD_FILENAME), whose YAML may name files that are elsewhere.
_CARD, _NAMES_FILES = "README.md", re.compile(r"---\n(?:(?!---).*\n)*?\s*(?:- )?data_files:")


def builder_of(name: str | PurePath) -> str | None:
    """Return the builder of ``datasets`` that reads a file of that name; None: none does."""
    return BUILDERS.get(uncompressed(name).suffix.lower())


def dataset_source(text: str | Path, split: str | None = None, config: str | None = None) -> DatasetSource:
    """Return the source of the dataset that ``text`` names: a file, a directory of files, or a hub id.

    A hub id is not checked here; loading fails if it does not exist or lacks the split.

    Args:
        split: the one to train on, or a part of it, such as ``train[:1000]``; None: ``train``.
        config: its configuration, where it has several; None: the only one.

    Raises:
        InputError: it is missing, empty, in no supported format, broken in a way that the fast checks detect, or a file
            that has no such split or configuration.
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
        raise InputError(f"{path} is in no format that autotune reads.", hint=f"It reads {_UNDERSTOOD}.")
    if glob.has_magic(str(path)):
        raise InputError(f"{path} has one of * ? [ in its name.", hint="Rename it: datasets takes it for a pattern.")
    if split.partition("[")[0] != _TRAIN:
        raise InputError(f"{path} is a file, and has no split but {_TRAIN}.", hint="Leave out --split.")
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
    """Return the source of the rows to evaluate on, or None if neither a dataset nor a split is named for them.

    A split of the training dataset or, if ``evaluation`` names another dataset, of that one. Without a split it is the
    only one that a file has, and else ``test``, which is what ``trl`` evaluates on (``ScriptArguments``).

    Args:
        trained: the split of ``dataset`` to train on; None: ``train``.
        config: the configuration of both, where they have several; None: the only one.

    Raises:
        InputError: the dataset cannot be used, or has no such split.
    """
    if evaluation is None and split is None:
        return None
    name = dataset if evaluation is None else evaluation
    if name is None:
        raise InputError("--eval-split needs a dataset, and there is none.", hint="Give a DATASET, or --eval-dataset.")
    source = dataset_source(name, config=config)
    if split is not None:
        check_split(split)
    if source.data_files is None:
        split = split or "test"
        found = replace(source, split=split, name=f"{source.name} ({split})")
    elif split in (None, source.split):
        found = source
    else:
        raise InputError(
            f"{source.name} is a file, and has no split but {source.split}.",
            hint="Name the file with the rows to evaluate on: --eval-dataset FILE.",
        )
    if dataset is not None and found == replace(dataset_source(dataset, trained, config), name=found.name):
        raise InputError(
            f"Evaluation rows and training rows are the same: {found.name}.",
            hint="Give other rows, or another split, such as --eval-split test.",
        )
    return found


def check_split(split: str) -> None:
    """Check the name of a split that ``trl`` looks up in a dataset by its name, as it does to evaluate.

    Raises:
        InputError: it is none, such as ``train[:1000]``.
    """
    if not _SPLIT.fullmatch(split):
        raise InputError(
            f"{split!r} is not the name of a split.",
            hint="With dataset_name or an evaluation, `trl` takes whole splits only, such as test or validation; an "
            "entry of datasets takes a part, such as split: train[:1000].",
        )


def check_one_load(rows: DatasetSource, evaluation: DatasetSource) -> None:
    """Check that ``trl`` can load the training and evaluation rows, which it loads in a single call.

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
    if any((directory / name).is_file() for name in _SAVED_TO_DISK_FILES):
        raise InputError(
            f"{directory} was written by save_to_disk, for load_from_disk of datasets: `trl` calls load_dataset, which "
            "refuses it, or guesses its files and splits.",
            hint="Write it with Dataset.to_parquet instead.",
        )
    if not _has_data(directory):
        # Rows of other formats, such as .arrow and .txt, are for ``datasets`` alone.
        kind = UnreadError if any(directory.iterdir()) else InputError
        raise kind(f"{directory} holds no dataset that autotune reads.", hint=f"It reads {_UNDERSTOOD}.")


def _has_data(directory: Path) -> bool:
    """Whether ``datasets`` may find a file: named by a card, as in a bundle, or at any depth.

    Hidden and ``__private`` names are left out.
    """
    card, hidden = directory / _CARD, (".", "__")
    if card.is_file() and _NAMES_FILES.match(card.read_text(encoding="utf-8", errors="replace")):
        return True
    for _, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(hidden)]
        if any(builder_of(name) is not None and not name.startswith(hidden) for name in names):
            return True
    return False


def check_file(file: Path, limit_bytes: int = CHECKED_BYTES) -> None:
    """Check that a file has rows, as far as that is fast or its first bytes are read.

    Args:
        limit_bytes: how much of a JSON file is read.

    Raises:
        InputError: it is empty or broken.
    """
    try:
        if file.stat().st_size == 0:
            raise InputError(f"{file} is empty.", hint="Give a dataset that has rows.")
        match builder_of(file):
            case "json":
                check_json(file, limit_bytes)
            case "parquet" if compression(file) is None:
                _check_parquet(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}.") from error


def _check_parquet(file: Path) -> None:
    whole = file.stat().st_size >= _SMALLEST_PARQUET_BYTES
    if whole:
        with file.open("rb") as stream:
            start = stream.read(len(_PARQUET_MAGIC))
            stream.seek(-len(_PARQUET_MAGIC), os.SEEK_END)
            whole = start == stream.read() == _PARQUET_MAGIC
    if not whole:
        raise InputError(f"{file} is not a Parquet file, or not a whole one.", hint="Write or download it again.")
