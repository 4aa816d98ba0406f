"""Rows with images are tokenised as by TRL's collator with the real images, although only their sizes are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from datasets import Dataset, Image, List, load_from_disk
from PIL import ExifTags
from PIL import Image as Pillow
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.rows.documents import NEVER_KEPT
from autotune.core.workload import DatasetSource, ModelSource, Workload
from autotune.errors import InputError, UnreadError
from autotune.step.images.sizes import ImageSize, image_sizes
from autotune.step.images.tokens import image_end
from autotune.step.jobs.prepare import _check_space
from autotune.step.trainers import find_adapter
from tests.contract.building import built
from tests.step.requests import prepared_here
from tests.vision import picture, small_processor, write_small_vision_model

SIZES = [[(90, 60)], [], [(40, 90), (64, 64)], [(90, 60)]]


def rows_of(images: Sequence[list[Any] | None]) -> Dataset:
    messages = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a model"}]
    return Dataset.from_dict({"messages": [messages] * len(images), "images": images}).cast_column(
        "images", List(Image())
    )


def of_pairs(images: Sequence[list[Any] | None]) -> Dataset:
    """Return preference pairs whose answers differ in length."""
    asked, answered = ({"role": role, "content": "what is this"} for role in ("user", "assistant"))
    pair = {"prompt": [asked], "chosen": [answered], "rejected": [{**answered, "content": "a model"}]}
    return Dataset.from_list([{**pair, "images": some} for some in images]).cast_column("images", List(Image()))


def of_answers(images: Sequence[list[Any] | None]) -> Dataset:
    """Return labelled answers, every other one longer."""
    asked = {"role": "user", "content": "what is this"}
    contents = [("a model", "memory of the model and its speed")[place % 2] for place in range(len(images))]
    return Dataset.from_list(
        [
            {
                "prompt": [asked],
                "completion": [{"role": "assistant", "content": content}],
                "label": place % 2 == 0,
                "images": some,
            }
            for place, (content, some) in enumerate(zip(contents, images, strict=True))
        ]
    ).cast_column("images", List(Image()))


def of_prompts(images: Sequence[list[Any] | None]) -> Dataset:
    """Return prompts with a column that reward functions may read."""
    prompt = [{"role": "user", "content": "what is this"}]
    return Dataset.from_list([{"prompt": prompt, "images": some, "answer": "a model"} for some in images]).cast_column(
        "images", List(Image())
    )


PICTURED: dict[str, Callable[[Sequence[list[Any] | None]], Dataset]] = {
    "sft": rows_of, "dpo": of_pairs, "kto": of_answers, "grpo": of_prompts, "rloo": of_prompts,
}  # fmt: skip
"""What makes rows of lists of images, by the trainer that they are for."""


def prepared(family: str, rows: Dataset, folder: Path, trainer: str = "sft") -> Workload:
    rows.to_parquet(str(folder / "rows.parquet"))
    model = ModelSource(str(write_small_vision_model(folder / family, family, weights=False)))
    source = DatasetSource("rows", "parquet", str(folder / "rows.parquet"))
    return prepared_here(PrepareRequest(model, source, trainer, str(folder / "tokenized")), folder / "prepare")


COLLATORS: dict[str, Any] = {
    "sft": DataCollatorForVisionLanguageModeling,
    "dpo": DataCollatorForVisionPreference,
    "kto": DataCollatorForVisionUnpairedPreference,
}
ANSWERS = {"dpo": ["chosen_ids", "rejected_ids"], "kto": ["completion_ids"]}
"""Columns of answers, each of which is a sequence behind the prompt."""


def of_trl(trainer: str, processor: Any, row: dict[str, Any]) -> Any:
    """Return a row as TRL tokenises it; for trainers that generate, its prompt alone."""
    if trainer in COLLATORS:
        return COLLATORS[trainer](processor)([row])
    return processor.apply_chat_template(
        [prepare_multimodal_messages(row["prompt"], images=row["images"])],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto"])
def test_rows_with_images_keep_every_column_that_the_collator_of_trl_reads(trainer: str) -> None:
    known = find_adapter(trainer)
    of_trl: Any = object.__new__(known.trainer)
    of_trl._signature_columns, of_trl._is_vision_dataset = None, True
    of_trl._set_signature_columns_if_needed()
    # The collators pass no tools to the template.
    assert {*of_trl._signature_columns} - {"image", "images", "tools"} == {*known.collated_columns}


@pytest.mark.parametrize("trainer", PICTURED)
@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava_next"])
def test_tokens_and_image_data_of_a_row_are_those_that_trl_makes_of_the_real_images(
    family: str, trainer: str, tmp_path: Path
) -> None:
    taken = [sizes for sizes in SIZES if sizes or trainer != "grpo"]
    rows = PICTURED[trainer]([[picture(*size) for size in sizes] for sizes in taken])
    images = prepared(family, rows, tmp_path, trainer).dataset.images
    found, processor = load_from_disk(str(tmp_path / "tokenized")), small_processor(family)
    answers = ANSWERS.get(trainer, [])
    for row, tokenised in zip(rows, found, strict=True):
        real = of_trl(trainer, processor, row)
        kept = zip(real["input_ids"], real["attention_mask"].bool(), strict=True)
        prompt = tokenised["input_ids" if trainer == "sft" else "prompt_ids"]
        assert [ids[mask].tolist() for ids, mask in kept] == (
            [prompt + tokenised[name] for name in answers] or [prompt]
        )
        if answers:
            assert real["completion_mask"].sum() == sum(len(tokenised[name]) for name in answers) > 0
        if trainer == "sft":
            assert tokenised["labels"] == real["labels"][0].tolist()
        if trainer == "kto":
            assert tokenised["label"] == row["label"]
        # Each image is in every sequence of its row.
        assert tokenised["image_elements"] == [real["pixel_values"].numel() if "pixel_values" in real else 0]
    assert trainer in COLLATORS or set(rows.column_names) < set(found.column_names)
    assert images is not None
    first = found["input_ids" if trainer == "sft" else "prompt_ids"]
    ends = [image_end(ids, processor) if sizes else 0 for ids, sizes in zip(first, taken, strict=True)]
    assert images.ends.counts == Counter(ends)
    assert images.in_row.counts == Counter(map(len, taken))
    assert images.pixels.counts == Counter(width * height for sizes in taken for width, height in sizes)


@pytest.mark.parametrize("trainer", PICTURED)
@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_null_for_a_list_of_images_is_taken_where_trl_takes_it(family: str, trainer: str, tmp_path: Path) -> None:
    rows, processor = PICTURED[trainer]([[picture(9, 9)], None, [picture(9, 9)]]), small_processor(family)
    if trainer != "sft":
        with pytest.raises(InputError, match="Row 2 of rows cannot be trained on by TRL") as refused:
            prepared(family, rows, tmp_path, trainer)
        assert "an empty list" in str(refused.value.hint)
        assert "attribute" not in refused.value.message
        if trainer in COLLATORS:
            with pytest.raises((ValueError, TypeError)):
                COLLATORS[trainer](processor)([rows[0], rows[1]])
        return
    images = prepared(family, rows, tmp_path).dataset.images
    assert images is not None
    assert images.in_row.counts == Counter({1: 2, 0: 1})
    found = load_from_disk(str(tmp_path / "tokenized"))[1]
    assert found["images"] is None
    assert found["input_ids"] == of_trl("sft", processor, rows[1])["input_ids"][0].tolist()
    assert COLLATORS["sft"](processor)([rows[0], rows[1]])["input_ids"].shape[0] == 2


def test_rows_of_which_none_has_an_image_are_left_open(tmp_path: Path) -> None:
    rows = rows_of([[], []])
    with pytest.raises(UnreadError, match="No row of rows has an image in its column images"):
        prepared("gemma3", rows, tmp_path)
    assert COLLATORS["sft"](small_processor("gemma3"))([rows[0], rows[1]])["input_ids"].shape[0] == 2


@pytest.mark.parametrize(("keeps_end", "needs"), [(False, 3), (True, 1)])
def test_rows_of_which_the_loss_counts_nothing_are_dropped_at_any_length_unless_they_have_images(
    keeps_end: bool, needs: int
) -> None:
    rows = Dataset.from_dict({"input_ids": [[3, 4, 5]] * 2, "labels": [[-100, -100, 5], [-100] * 3]})
    adapter = find_adapter("sft")
    assert adapter.min_kept_length(rows, keeps_end=keeps_end).tolist() == [needs, NEVER_KEPT]
    pictured = rows.add_column("images", [["a"]] * 2)
    assert adapter.min_kept_length(pictured, keeps_end=keeps_end).tolist() == [needs, 3]


def test_a_column_of_pairs_beside_labelled_answers_with_images_is_refused_in_trl_s_words(
    tmp_path: Path,
) -> None:
    rows = of_answers([[picture(9, 9)]] * 2)
    refused = r"TRL refuses rows: Vision datasets must be in unpaired format"
    with pytest.raises(InputError, match=refused):
        prepared("gemma3", rows.add_column("chosen", [rows[0]["completion"]] * 2), tmp_path, "kto")


def test_text_beside_prompts_with_images_is_refused_as_trl_may_take_all_for_text(
    tmp_path: Path,
) -> None:
    rows = of_prompts([[picture(9, 9)]] * 2).add_column("completion", ["a cat"] * 2)
    with pytest.raises(InputError, match="text in completion, and messages in prompt: TRL reads all columns of a row"):
        prepared("gemma3", rows, tmp_path, "grpo")


def test_pairs_with_images_are_refused_where_trl_takes_none(tmp_path: Path) -> None:
    refused = r"KTO on images only with prompt\+completion\+label, and its rows have prompt\+chosen\+rejected"
    with pytest.raises(InputError, match=refused) as found:
        prepared("gemma3", of_pairs([[picture(9, 9)]] * 2), tmp_path, "kto")
    assert not isinstance(found.value, UnreadError)


@pytest.mark.parametrize("name", ["text", "caption"])
def test_text_with_images_is_what_trl_makes_of_it_where_no_column_is_removed(name: str, tmp_path: Path) -> None:
    texts = ["<start_of_image> a model", "the memory of <start_of_image> a model"]
    rows = Dataset.from_dict({name: texts, "images": [[picture(90, 60)]] * 2, "source": ["a", "b"]})
    rows = rows.cast_column("images", List(Image()))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    model = write_small_vision_model(tmp_path / "gemma3", "gemma3")
    fields: dict[str, Any] = {"remove_unused_columns": False, "dataset_text_field": name}
    source = DatasetSource("rows", "parquet", str(tmp_path / "rows.parquet"), reading=fields)
    request = PrepareRequest(ModelSource(str(model)), source, "sft", str(tmp_path / "tokenized"))
    found = load_from_disk(prepared_here(request, tmp_path / "prepare").dataset.tokenized_directory)
    of_trl = built(
        "sft",
        model,
        tmp_path / "out",
        rows=list(rows),
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        **fields,
    )
    batches = list(of_trl.get_train_dataloader())
    assert found["input_ids"][:] == [batch["input_ids"][0].tolist() for batch in batches]
    assert found["labels"][:] == [batch["labels"][0].tolist() for batch in batches]
    with pytest.raises(InputError, match="and its rows have text"):
        prepared_here(replace(request, dataset=replace(source, reading={"dataset_text_field": name})), tmp_path / "two")


def test_images_need_a_prompt_of_messages(tmp_path: Path) -> None:
    rows = of_prompts([[picture(9, 9)]] * 2).remove_columns("prompt").add_column("prompt", ["what"] * 2)
    with pytest.raises(InputError, match="Row 1 of rows cannot be trained on by TRL: images need a prompt of messages"):
        prepared("gemma3", rows, tmp_path, "grpo")


@pytest.mark.parametrize("pictured_first", [True, False])
def test_rows_to_evaluate_on_have_images_where_those_to_train_on_have(tmp_path: Path, pictured_first: bool) -> None:
    pictured = rows_of([[picture(9, 9)]] * 2)
    pictured.to_parquet(str(tmp_path / "pictured.parquet"))
    pictured.remove_columns("images").to_parquet(str(tmp_path / "plain.parquet"))
    names = ("pictured", "plain") if pictured_first else ("plain", "pictured")
    trained, evaluated = (DatasetSource(name, "parquet", str(tmp_path / f"{name}.parquet")) for name in names)
    model = ModelSource(str(write_small_vision_model(tmp_path / "model", "gemma3", weights=False)))
    request = PrepareRequest(model, trained, "sft", str(tmp_path / "a"), evaluated, str(tmp_path / "b"))
    with pytest.raises(InputError, match="pictured has images, and plain has none"):
        prepared_here(request, tmp_path / "prepare")


def test_rows_that_the_disk_has_no_room_for_are_refused_before_they_are_copied(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    picture(90, 60).save(file)
    rows, left = rows_of([[str(file)]]), SimpleNamespace(free=file.stat().st_size // 2)
    with mock.patch("shutil.disk_usage", return_value=left), pytest.raises(UnreadError, match="which are copied to"):
        _check_space(rows, tmp_path, "rows")
    _check_space(rows, tmp_path, "rows")
    _check_space(rows_of([[str(tmp_path / "none.png")]]), tmp_path, "rows")


def test_rows_of_which_only_the_lengths_are_asked_for_are_not_saved(tmp_path: Path) -> None:
    rows_of([[picture(9, 9)]] * 2).to_parquet(str(tmp_path / "rows.parquet"))
    model = ModelSource(str(write_small_vision_model(tmp_path / "model", "gemma3", weights=False)))
    source = DatasetSource("rows", "parquet", str(tmp_path / "rows.parquet"))
    request = PrepareRequest(model, source, "sft", str(tmp_path / "tokenized"), only_lengths=True)
    assert prepared_here(request, tmp_path / "prepare").dataset.images is not None
    assert not (tmp_path / "tokenized").exists()


def test_sizes_are_those_of_the_decoded_images(tmp_path: Path) -> None:
    turned = Pillow.Exif()
    turned[ExifTags.Base.Orientation] = 6
    picture(30, 20).save(tmp_path / "turned.jpg", exif=turned)
    picture(30, 20).save(tmp_path / "turned.png", exif=turned)
    picture(30, 20).convert("CMYK").save(tmp_path / "cmyk.jpg")
    picture(8, 4).save(tmp_path / "moving.gif", save_all=True, append_images=[picture(8, 4), picture(8, 4)])
    files = ["turned.jpg", "turned.png", "cmyk.jpg", "moving.gif"]
    rows = rows_of([[str(tmp_path / file)] for file in files])
    found = [size for sizes in image_sizes(rows, None, "rows") for size in sizes or ()]
    assert found == [ImageSize(image.width, image.height, image.mode) for (image,) in rows["images"]]
    assert found[0] == ImageSize(20, 30)
    assert found[2].mode == "CMYK"
