"""Finds the dataset that a user named on disk, with fast checks only."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.core.workload import DatasetSource
from autotune.errors import InputError
from autotune.inspection.paths import local_path
from autotune.inspection.rows import CHECKED_BYTES, check_json, check_row_count

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""From the suffix of a file to the builder of ``datasets.load_dataset`` that reads it."""

_UNDERSTOOD = ", ".join(BUILDERS)
# The first and last four bytes of every file; four bytes of footer length are between (Apache Parquet, File Format).
_PARQUET_MAGIC = b"PAR1"
_SMALLEST_PARQUET_BYTES = 12
# Written by Dataset.save_to_disk and DatasetDict.save_to_disk, whose directories load_dataset refuses.
_SAVED_TO_DISK_FILES = ("state.json", "dataset_dict.json")


def dataset_source(text: str) -> DatasetSource:
    """Return where the dataset ``text`` names comes from: a file, a directory of files, or a hub id.

    A hub id is taken as it is: whether it exists shows when it is loaded.

    Raises:
        InputError: it is missing, empty, in no supported format, or broken in a way that the fast checks detect.
    """
    path = local_path(text, "dataset", frozenset(BUILDERS))
    if path is None:
        return DatasetSource(name=text, path=text)
    if path.is_dir():
        _check_directory(path)
        return DatasetSource(name=text, path=str(path))
    builder = BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise InputError(f"{path} is in no format that autotune reads.", hint=f"It reads {_UNDERSTOOD}.")
    if glob.has_magic(str(path)):
        raise InputError(f"{path} has one of * ? [ in its name.", hint="Rename it: datasets takes it for a pattern.")
    _check_files([path], path)
    return DatasetSource(name=text, path=builder, data_files=str(path))


def _check_directory(directory: Path) -> None:
    if any((directory / name).is_file() for name in _SAVED_TO_DISK_FILES):
        raise InputError(
            f"{directory} was written by Dataset.save_to_disk, which `trl` cannot load.",
            hint="Write it with Dataset.to_parquet instead.",
        )
    files = list(_data_files(directory))
    if not files:
        raise InputError(f"{directory} holds no dataset.", hint=f"Files that are understood end with {_UNDERSTOOD}.")
    _check_files(files, directory)


def _data_files(directory: Path) -> Iterator[Path]:
    """Yield the files that ``datasets`` would find: at any depth, hidden and ``__private`` names left out."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(names):
            if Path(name).suffix.lower() in BUILDERS and not name.startswith((".", "__")):
                yield Path(folder, name)


def _check_files(files: Sequence[Path], place: Path) -> None:
    counts: list[int | None] = []
    left_bytes = CHECKED_BYTES
    for file in files:
        try:
            counts.append(_check_file(file, left_bytes))
            left_bytes = max(0, left_bytes - file.stat().st_size)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}.") from error
    known = [count for count in counts if count is not None]
    if len(known) == len(counts):
        check_row_count(place, sum(known))


def _check_file(file: Path, limit_bytes: int) -> int | None:
    """Check a file; return its number of rows if counting them is fast, else None."""
    if file.stat().st_size == 0:
        raise InputError(f"{file} is empty.", hint="Give a dataset with at least two rows.")
    match BUILDERS[file.suffix.lower()]:
        case "json":
            return check_json(file, limit_bytes)
        case "parquet":
            _check_parquet(file)
    return None


def _check_parquet(file: Path) -> None:
    whole = file.stat().st_size >= _SMALLEST_PARQUET_BYTES
    if whole:
        with file.open("rb") as stream:
            start = stream.read(len(_PARQUET_MAGIC))
            stream.seek(-len(_PARQUET_MAGIC), os.SEEK_END)
            whole = start == stream.read() == _PARQUET_MAGIC
    if not whole:
        raise InputError(f"{file} is not a Parquet file, or not a whole one.", hint="Write or download it again.")
