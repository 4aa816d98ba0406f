"""Rows in a temporary file leave nothing behind in the cache of datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.files.scratch import scratch_folder
from autotune.core.workload import DatasetSource, ModelSource
from autotune.step.data.dataset import load_rows
from autotune.trainers import find_trainer
from tests.small import small_tokenizer, text_rows, write_rows


def test_what_datasets_makes_of_a_temporary_file_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with scratch_folder() as folder:
        file = write_rows(Path(folder) / "rows.jsonl", text_rows(["a b", "c"]))
        source = DatasetSource("rows.jsonl", "json", str(file))
        rows = load_rows(find_trainer("sft"), source, small_tokenizer(), ModelSource("model")).rows
        assert rows["text"] == ["a b", "c"]
        assert all(Path(folder) in Path(each["filename"]).parents for each in rows.cache_files)
    assert not (tmp_path / "cache").exists()
