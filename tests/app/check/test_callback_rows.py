"""The callback checks the rows that its trainer has, as the trainer has prepared them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from trl import DPOConfig, KTOConfig

import autotune
from autotune.api import preflight
from autotune.errors import InputError
from tests.app.check.conftest import cache_of
from tests.app.check.test_callback import built
from tests.small import write_rows


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_the_tokens_of_a_trainer_need_what_the_text_needs_that_it_made_them_of(
    trainer: str,
    small_model_directory: Path,
    rows: Callable[[str], Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_of(tmp_path_factory)))
    trained = [json.loads(line) for line in rows(trainer).read_text(encoding="utf-8").splitlines()]
    longer = [{name: item * 3 if isinstance(item, str) else item for name, item in row.items()} for row in trained]
    (both := tmp_path / "both").mkdir()
    write_rows(both / "train.jsonl", trained)
    evaluated = Dataset.from_json(str(write_rows(both / "test.jsonl", longer)), cache_dir=str(tmp_path / "cache"))
    options = {"eval_strategy": "epoch", "max_length": None, "per_device_eval_batch_size": 32}
    training = built(trainer, small_model_directory, rows(trainer), tmp_path, options=options, eval_dataset=evaluated)
    given = {"model": training.model, "processing_class": training.processing_class}
    given["train_dataloader"] = training.get_train_dataloader()
    training.create_optimizer()

    def checked(dataset: Path | None) -> Any:
        callback = autotune.PreflightCallback(dataset=dataset)
        found = callback._verdict(training.args, training, given, "4GiB")
        return found.outcome, found.need, found.documents_per_step, found.headline

    assert checked(None) == checked(both) != checked(rows(trainer))


def test_several_datasets_to_evaluate_on_are_written_as_one_with_the_columns_that_are_trained_on(
    tmp_path: Path,
) -> None:
    first, second = Dataset.from_list([{"prompt": "a", "id": 1}]), Dataset.from_list([{"prompt": "b", "source": "x"}])
    file, _ = preflight._rows(None, {"one": first, "two": second}, tmp_path / "rows.parquet", ["prompt", "answer"])
    assert Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache"))[:] == {"prompt": ["a", "b"]}
    with pytest.raises(InputError, match="datasets to evaluate on differ: The features can't be aligned"):
        preflight._rows(None, {"one": first, "two": second.map(lambda _: {"prompt": [1]})}, tmp_path / "rows.parquet")


@pytest.mark.parametrize("config", [DPOConfig, KTOConfig])
def test_rows_with_images_are_written_as_they_are(config: Any, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "p", "chosen": "c", "rejected": "r", "images": ["a.png"]}])
    args = config(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    file, prepared = preflight._rows(args, rows, tmp_path / "rows.parquet")
    assert not prepared
    assert Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache")).to_list() == rows.to_list()


def test_rows_in_a_format_of_torch_are_written_as_those_without(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt_ids": [1, 2], "completion_ids": [3], "label": True}])
    args = KTOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    file, prepared = preflight._rows(args, rows.with_format("torch"), tmp_path / "rows.parquet")
    assert prepared
    assert Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache")).to_list() == rows.to_list()


def test_a_stream_which_may_have_no_end_is_not_written(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    with pytest.raises(InputError, match=r"not a datasets\.Dataset"):
        preflight._rows(None, stream, tmp_path / "rows.parquet")
