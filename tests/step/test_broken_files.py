"""Files of rows that ``datasets`` cannot load are named, with the first broken line of JSON Lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trl import DatasetMixtureConfig, get_dataset
from trl.scripts.utils import DatasetConfig

from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError
from autotune.step.data.dataset import load_rows
from autotune.trainers import find_trainer
from tests.small import long_tailed_texts, small_tokenizer, text_rows, write_rows

ROWS = text_rows(long_tailed_texts(12))


def load(name: str, path: str, files: Path | None = None) -> None:
    source = DatasetSource(name, path, None if files is None else str(files))
    load_rows(find_trainer("sft"), source, small_tokenizer(), ModelSource("model"))


def test_a_broken_line_is_told_by_its_number(tmp_path: Path) -> None:
    file, good = tmp_path / "rows.jsonl", [json.dumps(row) for row in ROWS]
    file.write_text("\n".join([*good[:6], '{"text": "cut of', *good[6:]]))
    with pytest.raises(InputError, match=r"Line 7 of .*rows.jsonl is not a JSON object: .* at column 10"):
        load("rows.jsonl", "json", file)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("b.jsonl", b'{"text": "a"}\n{', r"Line 2 of .*b.jsonl is not a JSON object"),
        ("a.jsonl", b"", r"a.jsonl is empty"),
        ("b.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0)[:-12], r"cannot be (read|loaded): \w"),
    ],
)
def test_a_broken_file_in_a_directory_is_told(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    # Datasets passes over it.
    (tmp_path / "config.json").write_text('{\n"epochs": 3\n}')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        load(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("content", [b"PAR1", b"PAR1 and then cut off", b"version https://git-lfs"])
def test_a_parquet_file_that_is_not_whole_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be (read|loaded): \w"):
        load("rows.parquet", "parquet", tmp_path / "rows.parquet")


def test_a_first_row_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "\xff a"}\n{"text": "b"}\n')
    entry = {"path": "json", "data_files": str(file), "split": "train"}
    with pytest.raises(UnicodeDecodeError):
        next(iter(get_dataset(DatasetMixtureConfig([DatasetConfig(**entry)]))["train"]))
    with pytest.raises(InputError, match=r"Line 1 of .*rows.jsonl is not a JSON object: 'utf-8' codec can't decode"):
        load("rows.jsonl", "json", file)
    mixture = DatasetSource("rows.jsonl", "json", mixture=(entry,))
    with pytest.raises(InputError, match=r"Row 1 of rows.jsonl cannot be read: 'utf-8' codec can't decode"):
        load_rows(find_trainer("sft"), mixture, small_tokenizer(), ModelSource("model"))
