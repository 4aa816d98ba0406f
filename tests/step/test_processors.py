"""A tokenizer is loaded once, and what a trainer changes of it does not reach the next trace."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoProcessor

from autotune.core.workload import ModelSource
from autotune.errors import InputError
from autotune.step.models.loading import load_processor
from autotune.step.models.processors import processor_for, vocabularies_read_once
from tests.small import write_small_model
from tests.vision import small_processor, small_vision_config


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return ModelSource(str(write_small_model(tmp_path / "model", weights=False)))


def settings(tokenizer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(tokenizer).items() if name != "_tokenizer"}


def test_it_is_loaded_once(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ModelSource] = []

    def load(source: ModelSource, auto_class: type[Any]) -> Any:
        loaded.append(source)
        return load_processor(source, auto_class)

    monkeypatch.setattr("autotune.step.models.processors.load_processor", load)
    first, second = (processor_for(source, AutoProcessor) for _ in range(2))
    assert loaded == [source]
    assert first is not second
    assert first("memory and speed")["input_ids"] == second("memory and speed")["input_ids"]


def test_what_a_trainer_sets_does_not_reach_the_next_trace(source: ModelSource) -> None:
    fresh = load_processor(source, AutoProcessor)
    first = processor_for(source, AutoProcessor)
    first.pad_token, first.padding_side, first.chat_template = first.eos_token, "left", "{{ messages }}"
    first.model_input_names.append("new")
    second = processor_for(source, AutoProcessor)
    assert settings(second) == settings(fresh) != settings(first)


@pytest.mark.parametrize("change", ["words", "truncation"])
def test_one_whose_words_or_truncation_a_trainer_changed_is_loaded_again(source: ModelSource, change: str) -> None:
    fresh = load_processor(source, AutoProcessor)
    first = processor_for(source, AutoProcessor)
    backend: Tokenizer = first._tokenizer
    if change == "words":
        first.add_tokens(["<new>"])
    else:
        backend.enable_truncation(3)
    second = processor_for(source, AutoProcessor)
    assert second._tokenizer is not backend
    assert len(second) == len(fresh)
    assert second._tokenizer.truncation is None


def test_its_words_are_read_once_until_some_are_added(source: ModelSource) -> None:
    fresh = load_processor(source, AutoProcessor).get_vocab()
    with vocabularies_read_once():
        first, second = (processor_for(source, AutoProcessor) for _ in range(2))
        assert first.get_vocab() is second.get_vocab()
        assert first.get_vocab() == fresh
        first.add_tokens(["<new>"])
        assert first.get_vocab().keys() - fresh == {"<new>"}


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_without_a_package_that_it_needs_names_it(tmp_path: Path) -> None:
    processor = small_processor("qwen2_5_vl")
    processor.tokenizer.save_pretrained(tmp_path)
    processor.image_processor.save_pretrained(tmp_path)
    small_vision_config("qwen2_5_vl").save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**written, "processor_class": "Qwen2_5_VLProcessor"}), encoding="utf-8")
    with pytest.raises(InputError, match="requires the Torchvision library") as raised:
        load_processor(ModelSource(str(tmp_path)), AutoProcessor)
    assert "trl[vlm]" in raised.value.hint
