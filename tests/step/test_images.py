"""Rows with images that TRL cannot train on are refused in one sentence; limits of the processor are offered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import DPOConfig, GRPOConfig, ModelConfig, RLOOConfig, SFTConfig
from trl.trainer.kto_config import KTOConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.rows.images import ImageLimit
from autotune.core.workload import DatasetSource, ModelSource, Rollouts, Workload
from autotune.errors import InputError, UnreadError
from autotune.step.images.limits import image_limits
from autotune.step.images.messages import check_no_images
from autotune.step.trainers import find_adapter
from autotune.trainers import trainers
from tests.step.requests import prepared_here
from tests.step.test_images_tokenised import rows_of
from tests.trainers.samples import sample_rows
from tests.vision import picture, small_processor

Rows = list[dict[str, Any]]
Prepare = Callable[..., Workload]
SOURCE = DatasetSource("rows", "json")


@pytest.fixture
def prepared(small_model_directory: Path, tmp_path: Path) -> Prepare:
    def run(trainer: str, rows: Rows, evaluated: Rows | None = None) -> Workload:
        sources = [
            DatasetSource(name, "parquet", str(written(tmp_path / f"{name}.parquet", of)))
            for name, of in (("rows", rows), ("others", evaluated or rows))
        ]
        evaluation = sources[1] if evaluated is not None else None
        where = [str(tmp_path / name) for name in ("tokenized", "evaluation")]
        request = PrepareRequest(
            ModelSource(str(small_model_directory)), sources[0], trainer, where[0], evaluation, where[1]
        )
        return prepared_here(request, tmp_path / "prepare")

    return run


def written(file: Path, rows: Rows) -> Path:
    Dataset.from_list(rows).to_parquet(str(file))
    return file


def said(*parts: object) -> Rows:
    return [{"prompt": [{"role": "user", "content": part}]} for part in parts]


TEXT = {"type": "text", "text": "What is this?"}
IMAGE = {"type": "image", "image": "cat.png"}


@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("trainer", sorted(trainers()))
def test_a_column_of_images_is_refused_by_name_of_the_trainer(prepared: Prepare, trainer: str, column: str) -> None:
    rows = sample_rows(trainer, trainers()[trainer].formats[-1].name)
    # Some are probed on images; the small model has no processor of them.
    taken = trainers()[trainer].takes_images
    reason = "the model has no processor" if taken else f"{trainers()[trainer].label} on rows of text alone"
    with pytest.raises(InputError, match=rf"rows has images \(column {column}\), and .*{reason}") as refused:
        prepared(trainer, [{**row, column: [b"png"]} for row in rows])
    # TRL may well train on them, so that a check does not call it wrong.
    assert isinstance(refused.value, UnreadError) is not taken


@pytest.mark.parametrize(("trainer", "left_open"), [("grpo", True), ("rloo", True), ("sft", False)])
def test_empty_lists_of_images_are_left_open_where_trl_takes_their_rows_for_text(
    prepared: Prepare, trainer: str, left_open: bool
) -> None:
    rows = [{**row, "images": []} for row in sample_rows(trainer, trainers()[trainer].formats[-1].name)]
    reason = "No row of rows has an image in its column images" if left_open else "the model has no processor"
    with pytest.raises(InputError, match=reason) as refused:
        prepared(trainer, rows)
    assert isinstance(refused.value, UnreadError) is left_open


def test_two_columns_of_images_are_left_open_where_trl_reads_the_second(prepared: Prepare) -> None:
    rows = [{**row, "image": b"png", "images": [b"png"]} for row in sample_rows("grpo", "prompt")]
    with pytest.raises(UnreadError, match=r"rows has image and images: TRL generates with images alone"):
        prepared("grpo", rows)


def test_rows_with_images_to_evaluate_on_are_refused_too(prepared: Prepare) -> None:
    rows = sample_rows("grpo", "prompt")
    with pytest.raises(InputError, match=r"others has images \(column images\)"):
        prepared("grpo", rows, [{**row, "images": [b"png"]} for row in rows])


@pytest.mark.parametrize(
    "rows",
    [
        said([IMAGE, {**IMAGE, "image": "dog.png"}], [IMAGE]),
        said([{"type": "image", "text": None}, TEXT], [TEXT]),
        said([{"type": "image_url", "text": None}, TEXT], [TEXT]),
    ],
)
def test_an_image_in_a_message_is_refused(rows: Rows) -> None:
    with pytest.raises(InputError, match=r"rows has images \(in messages of prompt\)"):
        check_no_images(SOURCE, Dataset.from_list(rows), ["prompt"])


def test_an_image_in_a_message_is_refused_where_the_rows_are_of_mixed_types() -> None:
    for rows in (said("Look.", [IMAGE, TEXT]), said([TEXT], [TEXT, {"type": "image"}])):
        mixed = Dataset.from_list(rows, on_mixed_types="use_json")
        with pytest.raises(InputError, match=r"rows has images \(in messages of prompt\)"):
            check_no_images(SOURCE, mixed, ["prompt"])


@pytest.mark.parametrize(
    "rows",
    [
        said("a", "b"),
        said([TEXT], [TEXT, TEXT]),
        said([{"type": "text", "text": "image"}], [TEXT]),
        [{"prompt": "an image", "type": "image"}],
    ],
)
def test_text_is_taken_whatever_it_says_of_images(rows: Rows) -> None:
    check_no_images(SOURCE, Dataset.from_list(rows), ["prompt"])


def test_text_of_mixed_types_is_taken() -> None:
    mixed = Dataset.from_list(said('an "image"', [TEXT, {"type": "text"}]), on_mixed_types="use_json")
    check_no_images(SOURCE, mixed, ["prompt"])


SMALL, LARGE = (16, 16), (200, 100)
LIMITED = ("idefics3", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture
def rows() -> Dataset:
    return rows_of([[picture(*SMALL)], [picture(*LARGE)], [picture(*LARGE), picture(*SMALL)], []])


def changed(processor: Any, setting: str) -> Any:
    """Return a processor whose file a user has changed."""
    fields, (key, _, value) = processor.image_processor.to_dict(), setting.partition("=")
    if key == "size.longest_edge":
        size = {name: bound for name, bound in fields["size"].items() if bound is not None}
        fields["size"] = {**size, "longest_edge": int(value)}
    else:
        fields[key] = json.loads(value)
    processor.image_processor = type(processor.image_processor).from_dict(fields)
    return processor


def trained_on(processor: Any, rows: Dataset) -> tuple[int, list[int]]:
    """Return the tokens of all rows as TRL's collator makes them, and the pixel values of each, in ascending order."""
    collator = DataCollatorForVisionLanguageModeling(processor)
    found = find_adapter("sft").tokenized(
        SimpleNamespace(train_dataset=rows, data_collator=collator, args=SFTConfig), Rollouts(), "rows"
    )
    return sum(map(len, found["input_ids"])), sorted(number for (number,) in found["image_elements"])


def elements_of(limit: ImageLimit) -> list[int]:
    return sorted(number for number, rows in limit.elements.counts.items() for _ in range(rows))


@pytest.mark.parametrize("family", LIMITED)
def test_a_smaller_limit_takes_the_tokens_and_pixels_that_a_changed_processor_takes(family: str, rows: Dataset) -> None:
    present, *smaller = image_limits(rows, small_processor(family), "rows")
    assert smaller
    tokens, elements = trained_on(small_processor(family), rows)
    assert elements_of(present) == elements
    for limit in smaller:
        fewer, less = trained_on(changed(small_processor(family), limit.setting), rows)
        assert tokens - fewer == present.tokens.tokens - limit.tokens.tokens > 0
        assert elements_of(limit) == less


def test_limits_that_change_no_image_are_left_out() -> None:
    processor = changed(small_processor("qwen2_5_vl"), "size.longest_edge=1048576")
    present, first, *_ = image_limits(rows_of([[picture(*SMALL)], [picture(*LARGE)]]), processor, "rows")
    assert present.setting == "size.longest_edge=1048576"
    # The largest power of two that is smaller than what 200 x 100 pixels become.
    assert first.setting == "size.longest_edge=16384"


def test_images_that_no_smaller_limit_changes_have_none() -> None:
    tiny = rows_of([[picture(*SMALL)], [picture(*SMALL)]])
    assert image_limits(tiny, small_processor("qwen2_5_vl"), "rows") == ()


@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_a_processor_without_a_limit_has_no_offer(family: str, rows: Dataset) -> None:
    assert image_limits(rows, small_processor(family), "rows") == ()


def test_images_of_one_size_are_processed_once_for_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def calls(rows: Dataset) -> int:
        processor = small_processor("qwen2_5_vl")
        own = type(processor).__call__

        def call(self: Any, **given: Any) -> Any:
            asked.append(given)
            return own(self, **given)

        asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(type(processor), "__call__", call)
            assert image_limits(rows, processor, "rows")
        return len(asked)

    assert calls(rows_of([[picture(*LARGE)]] * 50)) == calls(rows_of([[picture(*LARGE)]] * 2)) > 0


def test_a_max_pixels_in_the_same_file_overrides_the_limit() -> None:
    own = small_processor("qwen2_5_vl").image_processor
    fields = {**own.to_dict(), "size": {"shortest_edge": 256, "longest_edge": 1024}, "max_pixels": 4096}
    assert type(own).from_dict(fields).size["longest_edge"] == 4096
    # Published files of Qwen's have it alone.
    alone = {"max_pixels": 4096, "min_pixels": 256, "image_processor_type": fields["image_processor_type"]}
    assert type(own).from_dict(alone).size["longest_edge"] == 4096


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, KTOConfig, GRPOConfig, RLOOConfig, ModelConfig])
def test_trl_has_no_option_for_a_processor_s_images(config: type[Any]) -> None:
    names = {field.name for field in dataclasses.fields(config)}
    assert not [name for name in names if "pixels" in name or "image" in name or "processor" in name]
