"""Mixtures of datasets are loaded as by ``trl``, and streamed rows are refused as by ``trl``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import DatasetMixtureConfig, SFTConfig, SFTTrainer, get_dataset
from trl.scripts.utils import DatasetConfig

from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError
from autotune.step.data.dataset import load_rows
from autotune.trainers import find_trainer
from tests.contract.building import built
from tests.small import small_tokenizer, text_rows, write_rows


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    one, two = ([{**row, "score": 1} for row in text_rows(texts)] for texts in (["a", "b c", "d"], ["e f g", "h"]))
    return str(write_rows(tmp_path / "one.jsonl", one)), str(write_rows(tmp_path / "two.jsonl", two))


def loaded(*entries: dict[str, Any], test_size: object = None) -> list[str]:
    source = DatasetSource("a mixture", "json", mixture=entries, test_size=test_size)
    rows = load_rows(find_trainer("sft"), source, small_tokenizer(), ModelSource("model")).rows
    return list(rows["text"])


def of_trl(*entries: dict[str, Any]) -> list[str]:
    mixture = DatasetMixtureConfig(datasets=[DatasetConfig(**item) for item in entries])
    return list(get_dataset(mixture)["train"]["text"])


@pytest.mark.parametrize("fractions", [(None, None), (0.5, 0.5), (0.25, 0.75)])
@pytest.mark.parametrize("columns", [["text"], None])
def test_rows_of_a_mixture_are_those_of_trl(
    files: tuple[str, str], fractions: tuple[float | None, float | None], columns: list[str] | None
) -> None:
    entries = [
        {"path": "json", "data_files": file, "columns": columns, "fraction": share}
        for file, share in zip(files, fractions, strict=True)
    ]
    assert loaded(*entries) == of_trl(*entries)


def test_several_files_and_a_directory_are_read_too(files: tuple[str, str]) -> None:
    entries = {"path": "json", "data_files": list(files)}, {"path": "json", "data_dir": str(Path(files[0]).parent)}
    assert loaded(*entries) == of_trl(*entries)
    assert len(loaded(*entries)) == 10


def test_files_of_one_dataset_with_other_columns_are_told(files: tuple[str, str], tmp_path: Path) -> None:
    other = str(write_rows(tmp_path / "other.jsonl", [{"text": "a", "label": 2}]))
    said = r"cannot be read: its columns differ: there are 1 new columns \({'label'}\)\."
    with pytest.raises(InputError, match=said):
        loaded({"path": "json", "data_files": [files[0], other]})


def test_files_whose_columns_cannot_be_joined_are_told(tmp_path: Path) -> None:
    given = {"one": None, "other": {"of": "b"}}
    files = [write_rows(tmp_path / f"{name}.jsonl", [{"text": "a", "score": of}]) for name, of in given.items()]
    entries = [{"path": "json", "data_files": str(file)} for file in files]
    with pytest.raises(AttributeError):
        of_trl(*entries)
    with pytest.raises(InputError, match="a mixture cannot be loaded"):
        loaded(*entries)


def test_splits_of_a_directory_in_two_formats_are_told(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", text_rows(["a", "b"]))
    (tmp_path / "test.csv").write_text("text\na\n")
    with pytest.raises(InputError, match="folder cannot be loaded: Couldn't infer the same data file format for all"):
        load_rows(find_trainer("sft"), DatasetSource("folder", str(tmp_path)), None, ModelSource("model"))


@pytest.mark.parametrize(("script", "said"), [(False, "data files"), (True, "Dataset scripts are no longer supported")])
def test_a_directory_without_rows_is_told(tmp_path: Path, script: bool, said: str) -> None:
    if script:
        (tmp_path / f"{tmp_path.name}.py").write_text("")
    with pytest.raises(InputError, match=f"folder cannot be loaded: .*{said}"):
        load_rows(find_trainer("sft"), DatasetSource("folder", str(tmp_path)), None, ModelSource("model"))


def test_a_share_to_evaluate_on_that_the_rows_do_not_have_is_told(files: tuple[str, str]) -> None:
    entries = [{"path": "json", "data_files": file} for file in files]
    assert len(loaded(*entries, test_size=2)) == 5
    with pytest.raises(InputError, match="test_size=5 should be"):
        loaded(*entries, test_size=5)


def test_streamed_rows_need_a_number_of_steps(small_model_directory: Path, tmp_path: Path) -> None:
    rows = Dataset.from_list(text_rows(["a b", "c d"])).to_iterable_dataset()
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        SFTTrainer(str(small_model_directory), args=args, train_dataset=rows)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_streamed_rows_have_no_reference_beforehand(
    name: str, small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dataset, "from_list", lambda rows, _of=Dataset.from_list: _of(rows).to_iterable_dataset())
    with pytest.raises(ValueError, match="not supported with IterableDataset"):
        built(name, small_model_directory, tmp_path, precompute_ref_log_probs=True).train()


def test_no_streamed_row_is_dropped(
    small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dataset, "from_list", lambda rows, _of=Dataset.from_list: _of(rows).to_iterable_dataset())
    sizes: dict[str, Any] = {"per_device_train_batch_size": 64, "dataloader_drop_last": True}
    (batch,) = built("sft", small_model_directory, tmp_path, **sizes).get_train_dataloader()
    assert len(batch["input_ids"]) == 4


def test_streamed_rows_cannot_be_parted(files: tuple[str, str]) -> None:
    entries = [DatasetConfig("json", data_files=file) for file in files]
    with pytest.raises(AttributeError, match="train_test_split"):
        get_dataset(DatasetMixtureConfig(entries, streaming=True, test_split_size=0.5))
