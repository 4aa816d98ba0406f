"""Rows of tokens are read as by SFTTrainer, for every type of list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value, load_dataset, load_from_disk
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import prepare
from tests.small import small_config, small_tokenizer

TOKENS = [[3, 4, 5, 6], [7, 8, 9, 3], [4, 5, 6, 7]]
FLAGS = [[False, False, True, True], [False, True, True, True], [True, True, False, True]]


def trl_trainer(rows: Dataset, folder: Path, **args: Any) -> SFTTrainer:
    few = {"max_length": None, "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    return SFTTrainer(
        model=AutoModelForCausalLM.from_config(small_config()),
        args=SFTConfig(str(folder / "trl"), **{**few, **args}),
        train_dataset=rows,
        processing_class=small_tokenizer(),
    )


def read_by_autotune(file: Path, model: Path, **reading: object) -> Dataset:
    source = DatasetSource("rows.parquet", "parquet", str(file), reading=reading)
    request = PrepareRequest(ModelSource(str(model)), source, "sft", str(file.parent / "tokenized"))
    prepare(request, JobContext(file.parent, 0.0))
    return load_from_disk(request.tokenized_directory)


FIXED = {"input_ids": List(Value("int32"), length=4)}
CASES: dict[str, tuple[Any, ...]] = {
    "completion mask": ({"completion_mask": FLAGS}, None, {"completion_only_loss": True}),
    "assistant mask": ({"assistant_masks": FLAGS}, None, {}),
    "mask of fractions": ({"assistant_masks": [[float(flag) for flag in flags] for flags in FLAGS]}, None, {}),
    "fixed length": ({}, FIXED, {}),
    "labels of fixed length": ({"labels": TOKENS}, {**FIXED, "labels": List(Value("int64"), length=4)}, {}),
    "mask of fixed length": (
        {"completion_mask": FLAGS},
        {**FIXED, "completion_mask": List(Value("bool"), length=4)},
        {"completion_only_loss": True},
    ),
}


@pytest.mark.parametrize(("columns", "features", "reading"), CASES.values(), ids=CASES)
def test_tokens_and_labels_are_those_of_trl(
    columns: dict[str, Any],
    features: dict[str, Any] | None,
    reading: dict[str, Any],
    small_model_directory: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.parquet"
    Dataset.from_dict({"input_ids": TOKENS, **columns}, features and Features(features)).to_parquet(str(file))
    made = trl_trainer(load_dataset("parquet", data_files=str(file), split="train"), tmp_path, **reading)
    found = read_by_autotune(file, small_model_directory, **reading)
    for column in ("input_ids", "labels"):
        assert found[column][:] == made.train_dataset[column][:]
    masks: list[Any] = next((values for name, values in columns.items() if name != "labels"), [])
    assert [[label != -100 for label in labels] for labels in found["labels"]] == (masks or [[True] * 4] * 3)


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_null_among_the_tokens_of_a_row_is_told_as_training_ends_at_it(
    column: str, small_model_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    rows = Dataset.from_dict({"input_ids": TOKENS, "labels": TOKENS, column: [TOKENS[0], [7, None, 9, 3], TOKENS[2]]})
    rows.to_parquet(str(file))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        trl_trainer(rows.select([1]), tmp_path, per_device_train_batch_size=1).train()
    with pytest.raises(
        InputError, match=rf"Row 2 \(counted from 1\) of rows.parquet has null among its {column}: training fails"
    ):
        read_by_autotune(file, small_model_directory)


def test_null_in_a_mask_leaves_its_token_out_of_the_loss(small_model_directory: Path, tmp_path: Path) -> None:
    file, flags = tmp_path / "rows.parquet", [[1, 1, 1, 1], [None, 1, 1, 0], [0, 1, 1, 1]]
    rows = Dataset.from_dict({"input_ids": TOKENS, "assistant_masks": flags})
    rows.to_parquet(str(file))
    found = read_by_autotune(file, small_model_directory)
    assert found["labels"][:] == trl_trainer(rows, tmp_path).train_dataset["labels"][:]


def test_rows_without_a_label_that_counts_are_refused(small_model_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    Dataset.from_dict({"input_ids": TOKENS, "labels": [[-100] * 4] * 3}).to_parquet(str(file))
    with pytest.raises(InputError, match=r"The loss counts no token of rows.parquet: all its labels are -100\."):
        read_by_autotune(file, small_model_directory)


def test_documents_of_rows_that_are_packed_already_stay_apart_in_a_probe_as_in_trl(
    small_model_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    rows = Dataset.from_dict({"input_ids": TOKENS, "seq_lengths": [[1, 3], [4], [2, 2]]})
    rows.to_parquet(str(file))
    found = read_by_autotune(file, small_model_directory)
    own, other = (
        trl_trainer(each, tmp_path, padding_free=True, per_device_train_batch_size=3).get_train_dataloader()
        for each in (found, rows)
    )
    starts = [sorted((batch["position_ids"] == 0).sum().item() for batch in loader) for loader in (own, other)]
    assert starts == [[5], [5]]


@pytest.mark.parametrize(("lengths", "held"), [([[1, 3], [4], [2, 1]], 3), ([[4], [4], [2, None]], 0)])
def test_documents_of_other_lengths_than_their_row_are_told_as_trl_ends_at_them_without_padding(
    lengths: list[list[int | None]], held: int, small_model_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    rows = Dataset.from_dict({"input_ids": TOKENS, "seq_lengths": lengths})
    rows.to_parquet(str(file))
    trl_trainer(rows, tmp_path).train()
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)):
        trl_trainer(rows, tmp_path, padding_free=True, per_device_train_batch_size=3).train()
    with pytest.raises(UnreadError, match=rf"Row 3 .* of rows.parquet has 4 tokens, and documents of {held} together"):
        read_by_autotune(file, small_model_directory)


@pytest.mark.parametrize("column", ["labels", "completion_mask"])
def test_rows_with_fewer_labels_than_tokens_are_refused(
    column: str, small_model_directory: Path, tmp_path: Path
) -> None:
    file, reading = tmp_path / "rows.parquet", {"completion_only_loss": True}
    rows = Dataset.from_dict({"input_ids": TOKENS, column: [[1, 1, 1, 1], [1, 1], [1, 1]]})
    rows.to_parquet(str(file))
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        trl_trainer(rows.select([1, 2]), tmp_path, per_device_train_batch_size=2, **reading).train()
    with pytest.raises(InputError, match=r"Row 2 \(counted from 1\) of rows.parquet has 4 tokens, and .* mask for 2: "):
        read_by_autotune(file, small_model_directory, **reading)
