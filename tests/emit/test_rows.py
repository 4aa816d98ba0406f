"""Rows cut for the bundle equal those that the trainer would cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_dataset
from trl.scripts.utils import DatasetConfig

from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetSource, Workload
from autotune.emit.rows import FILES, cut_length, training_rows, write_copied_rows, write_rows
from autotune.errors import InputError
from autotune.trainers import find_trainer
from tests.reporting.examples import a_workload

ROWS = {
    "input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12, 13, 14]],
    "labels": [[1, 2, 3, 4, 5], [-100, 7], [-100, -100, -100, 11], [-100, 13, -100]],
    "messages": ["a", "b", "c", "d"],
}


SFT = find_trainer("sft")


@pytest.fixture
def tokenized_directory(tmp_path: Path) -> Path:
    """Four tokenised rows on disk in two files, as a run keeps them."""
    Dataset.from_dict(ROWS).save_to_disk(tmp_path / "tokenized", num_shards=2)
    return tmp_path / "tokenized"


def test_rows_are_cut_and_those_without_a_counted_label_dropped(tokenized_directory: Path, tmp_path: Path) -> None:
    write_copied_rows(SFT, tokenized_directory, 3, tmp_path / "rows.parquet")
    assert pq.read_metadata(tmp_path / "rows.parquet").num_rows == 3
    assert pq.read_table(tmp_path / "rows.parquet").to_pydict() == {
        "input_ids": [[1, 2, 3], [6, 7], [12, 13, 14]],
        "labels": [[1, 2, 3], [-100, 7], [-100, 13, -100]],
    }


def test_the_rows_of_a_selection_are_cut_in_its_order(tmp_path: Path) -> None:
    Dataset.from_dict(ROWS).select([3, 0]).save_to_disk(tmp_path / "selected")
    write_copied_rows(SFT, tmp_path / "selected", 2, tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet")["input_ids"].to_pylist() == [[12, 13], [1, 2]]


def test_datasets_loads_the_file_by_its_entry(tokenized_directory: Path, tmp_path: Path) -> None:
    write_copied_rows(SFT, tokenized_directory, 3, tmp_path / "rows.parquet")
    rows = training_rows(a_workload(), TrainingPlan("sft", truncate_to=1024), tmp_path)
    assert load_dataset(**rows.entry(rows.split)).column_names == ["input_ids", "labels"]


def test_the_users_dataset_is_named_where_no_row_is_longer(tmp_path: Path) -> None:
    plan = TrainingPlan("sft", truncate_to=a_workload().dataset.lengths.longest)
    assert cut_length(a_workload(), plan) is None
    assert training_rows(a_workload(), plan, tmp_path).data_files == "/data/chats.jsonl"


def test_rows_are_cut_where_one_token_is_too_many() -> None:
    longest = a_workload().dataset.lengths.longest
    assert cut_length(a_workload(), TrainingPlan("sft", truncate_to=longest - 1)) == longest - 1


def test_a_full_disk_is_named(tokenized_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)
    (tmp_path / f".rows.parquet.{'0' * 8}.part").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"rows\.parquet cannot be written"):
        write_copied_rows(SFT, tokenized_directory, 3, tmp_path / "rows.parquet")


def test_a_moved_bundle_keeps_its_script_right(tmp_path: Path) -> None:
    from autotune.emit.bundle import script_text
    from autotune.emit.figures import measured
    from tests.reporting.examples import a_result

    result = a_result()
    assert result.recommended is not None
    plan = TrainingPlan("sft", {"padding_free": True, "max_length": None}, truncate_to=1024)
    chosen = replace(result.recommended, plan=plan)
    text = script_text(measured(result, chosen), training_rows(result.workload, plan, tmp_path))
    assert "str(BUNDLE / 'rows.parquet')" in text
    assert repr(str(tmp_path / "rows.parquet")) not in text


def evaluated(source: DatasetSource, evaluation: DatasetSource, directory: Path) -> Workload:
    """Return a workload that is evaluated, whose tokenised rows lie in a directory."""
    of = a_workload()
    profile = replace(of.dataset, tokenized_directory=str(directory))
    return replace(of, dataset=profile, dataset_source=source, evaluation_source=evaluation, evaluation=profile)


PLAN = TrainingPlan("sft", {"eval_strategy": "epoch"})


@pytest.mark.parametrize("config", [None, "main"])
def test_trl_finds_both_splits_of_one_dataset(tmp_path: Path, config: str | None) -> None:
    source = DatasetSource("openai/gsm8k", "openai/gsm8k", config=config)
    rows = write_rows(evaluated(source, replace(source, split="test"), tmp_path), PLAN, tmp_path)
    named = {"dataset_name": "openai/gsm8k", **({"dataset_config": config} if config else {})}
    assert rows.arguments() == {**named, "dataset_train_split": "train", "dataset_test_split": "test"}
    assert not any((tmp_path / name).exists() for name in FILES)


@pytest.mark.parametrize("plan", [PLAN, TrainingPlan("sft")], ids=["evaluated", "not evaluated"])
@pytest.mark.parametrize("cut", [False, True])
def test_trl_splits_off_the_rows_that_the_user_asked_for(
    plan: TrainingPlan, cut: bool, tokenized_directory: Path, tmp_path: Path
) -> None:
    source = DatasetSource("chats.jsonl", "json", "/data/chats.jsonl", test_size=0.25)
    of = evaluated(source, replace(source, name="a part of it"), tokenized_directory)
    rows = write_rows(of, replace(plan, truncate_to=3 if cut else None), tmp_path)
    place = str(tmp_path / "rows.parquet") if cut else "/data/chats.jsonl"
    assert (rows.place, rows.arguments()["test_split_size"]) == (place, 0.25)
    assert [name for name in FILES if (tmp_path / name).exists()] == ["rows.parquet"] * cut


def test_trl_finds_the_configuration_of_a_dataset_without_evaluation(tmp_path: Path) -> None:
    source = DatasetSource("openai/gsm8k", "openai/gsm8k", config="main")
    rows = write_rows(replace(a_workload(), dataset_source=source), TrainingPlan("sft"), tmp_path)
    (entry,) = cast(list[dict[str, str]], rows.arguments()["datasets"])
    assert DatasetConfig(**entry) == DatasetConfig("openai/gsm8k", "main", split="train")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_trl_finds_two_files_as_splits_of_a_directory(tmp_path: Path, suffix: str) -> None:
    texts = {"here: we are": "train", "there": "test"}
    for text, split in texts.items():
        file = tmp_path / f"{split} rows.{suffix}"
        Dataset.from_dict({"text": [text]}).to_csv(file) if suffix == "csv" else Dataset.from_dict(
            {"text": [text]}
        ).to_json(file)
    builder = {"jsonl": "json", "csv": "csv"}[suffix]
    sources = [DatasetSource(split, builder, str(tmp_path / f"{split} rows.{suffix}")) for split in ("train", "test")]
    bundle = tmp_path / "bundle"
    rows = write_rows(evaluated(sources[0], sources[1], tmp_path), PLAN, bundle)
    found = load_dataset(str(rows.arguments()["dataset_name"]))
    assert {found[split]["text"][0]: split for split in found} == texts
    # A later recommendation without evaluation needs none of it.
    write_rows(replace(a_workload(), dataset_source=sources[0]), TrainingPlan("sft"), bundle)
    assert not any((bundle / name).exists() for name in FILES)


def test_rows_that_are_cut_are_cut_for_evaluation_too(tokenized_directory: Path, tmp_path: Path) -> None:
    source = DatasetSource("a", "json", "/a.jsonl")
    workload = evaluated(source, replace(source, data_files="/b.jsonl"), tokenized_directory)
    rows = write_rows(workload, replace(PLAN, truncate_to=3), tmp_path)
    assert rows.cut
    found = load_dataset(str(rows.arguments()["dataset_name"]))
    assert {split: max(map(len, found[split]["input_ids"])) for split in found} == {"train": 3, "test": 3}
    for split in ("train", "test"):
        assert len(load_dataset(**rows.entry(split))) == len(found[split])
