"""Smaller limits of a processor's images: what is reported is what a model folder with that limit trains on."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import DPOConfig, GRPOConfig, ModelConfig, RLOOConfig, SFTConfig
from trl.trainer.kto_config import KTOConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotune.core.images import ImageLimit
from autotune.core.workload import Rollouts
from autotune.step.images.limits import image_limits
from autotune.step.trainers import adapter
from tests.step.test_images_tokenised import rows_of
from tests.vision import picture, small_processor

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
    found = adapter("sft").tokenized(SimpleNamespace(train_dataset=rows, data_collator=collator), Rollouts(), "rows")
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


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, KTOConfig, GRPOConfig, RLOOConfig, ModelConfig])
def test_trl_has_no_option_for_a_processor_s_images(config: type[Any]) -> None:
    names = {field.name for field in dataclasses.fields(config)}
    assert not [name for name in names if "pixels" in name or "image" in name or "processor" in name]
