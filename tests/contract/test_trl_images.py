"""Contract with TRL: its rules for rows with images, which the rules of the catalogue and of tokenising follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.contract.building import config_class, trainer_class
from tests.vision import picture, small_processor, write_small_vision_model

Build = Callable[..., Any]
SIZES = ((90, 60), (20, 20))
ASKED, ANSWERED = {"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a model"}
ROWS = {
    "sft": {"messages": [ASKED, ANSWERED]},
    "dpo": {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]},
}
COMPLETED = {"prompt": [ASKED], "completion": [ANSWERED]}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_vision_model(tmp_path_factory.mktemp("vision"), "gemma3")


@pytest.fixture
def build(vision_model: Path, tmp_path: Path) -> Build:
    def built(name: str = "sft", row: dict[str, Any] | None = None, **fields: object) -> Any:
        from transformers import AutoModelForImageTextToText

        rows = [{**(row or ROWS[name]), "images": [picture(*size)]} for size in SIZES]
        usual = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2, "max_steps": 1}
        return trainer_class(name)(
            model=AutoModelForImageTextToText.from_pretrained(vision_model),
            args=config_class(name)(str(tmp_path), **{**usual, "save_strategy": "no", **fields}),
            train_dataset=Dataset.from_list(rows),
            processing_class=small_processor("gemma3"),
        )

    return built


def batch_of(trainer: Any) -> Any:
    return next(iter(trainer.get_train_dataloader()))


def test_packing_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="Packing is not supported for vision datasets"):
        build(packing=True)


def test_padding_free_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="Padding-free training is yet not supported for vision"):
        build(padding_free=True, max_length=None)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_keeping_the_end_is_refused(build: Build, name: str) -> None:
    with pytest.raises(ValueError, match="'keep_end' is not supported for vision"):
        build(name, truncation_mode="keep_end")


def test_precomputed_reference_is_refused_by_dpo(build: Build) -> None:
    with pytest.raises(ValueError, match="`precompute_ref_log_probs=True` is not supported for vision"):
        build("dpo", precompute_ref_log_probs=True)


def test_a_length_that_cuts_tokens_of_an_image_fails(build: Build) -> None:
    with pytest.raises(ValueError, match="Mismatch in `image` token count"):
        batch_of(build(max_length=4))


def test_no_row_is_tokenised_before_its_micro_batch(build: Build) -> None:
    trainer = build()
    assert trainer.train_dataset.column_names == ["messages", "images"]
    assert {"input_ids", "labels", "pixel_values"} <= set(batch_of(trainer))


def test_rows_are_rounded_up_where_they_are_messages_alone(build: Build) -> None:
    assert batch_of(build(pad_to_multiple_of=64))["input_ids"].shape[1] == 64
    with pytest.raises(NotImplementedError, match="not yet implemented for vision-language"):
        batch_of(build(row=COMPLETED, pad_to_multiple_of=64))


def test_rows_are_not_rounded_up_where_the_maximum_length_is_no_multiple(build: Build) -> None:
    assert batch_of(build(pad_to_multiple_of=64, max_length=128))["input_ids"].shape[1] == 64
    with pytest.raises(ValueError, match="is not a multiple of pad_to_multiple_of"):
        batch_of(build(pad_to_multiple_of=64, max_length=100))


def test_a_column_of_text_is_left_out_so_that_such_rows_fail(build: Build) -> None:
    with pytest.raises(KeyError, match="Unexpected input keys"):
        batch_of(build(row={"text": "<start_of_image> a model"}))


def test_columns_of_tokens_do_not_change_what_is_trained_on(build: Build) -> None:
    plain = batch_of(build())
    added = batch_of(build(row={**ROWS["sft"], "input_ids": [1], "labels": [1]}))
    assert added.keys() == plain.keys()
    assert added["input_ids"].tolist() == plain["input_ids"].tolist()


def test_bytes_are_no_images_and_a_path_is(build: Build, tmp_path: Path) -> None:
    picture(9, 9).save(tmp_path / "a.png")
    trainer = build()
    with pytest.raises(TypeError, match="only a single or a list of entries is supported"):
        trainer.data_collator([{**ROWS["sft"], "images": [b"png"]}])
    # A path is opened, but only where the training was started from the folder that it is relative to.
    assert trainer.data_collator([{**ROWS["sft"], "images": [str(tmp_path / "a.png")]}])["pixel_values"].shape[0] == 1
