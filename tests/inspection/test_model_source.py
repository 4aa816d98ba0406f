"""The spellings of a model, and the messages if it does not exist."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from autotune.core.workload import ModelSource
from autotune.errors import InputError, UnreadError
from autotune.inspection.dataset import dataset_source
from autotune.inspection.model import model_source


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("text", ["gpt2", "Qwen/Qwen2.5-0.5B", "org/name_with-all.kinds"])
def test_a_name_that_is_not_on_this_disk_is_a_hub_id(text: str) -> None:
    assert model_source(text, "random") == ModelSource(name=text, init="random")


def test_a_directory_is_named_by_its_absolute_path(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    assert model_source("model", "random") == ModelSource(name=str(directory), init="random")


def test_a_path_object_is_taken_as_its_text(directory: Path) -> None:
    assert model_source(directory, "random") == model_source(str(directory), "random")


def test_a_config_file_stands_for_its_directory(directory: Path) -> None:
    assert model_source(str(directory / "config.json"), "random").name == str(directory)


def test_where_nothing_is_tokenised_a_configuration_is_enough(directory: Path) -> None:
    assert model_source(str(directory), "random", tokenizes=False) == model_source(str(directory), "random")
    (directory / "tokenizer.json").unlink()
    bare = ModelSource(str(directory), tokenizer=False)
    assert model_source(str(directory), "random", tokenizes=False) == bare
    assert model_source(str(directory / "config.json"), "random", tokenizes=False) == bare
    named = (directory / "config.json").rename(directory / "llama8b.json")
    assert model_source(str(named), "random", tokenizes=False) == ModelSource(str(named), tokenizer=False)
    with pytest.raises(InputError, match=r"no config\.json\..*--seq-len"):
        model_source(str(named), "random")


def test_a_home_relative_path_is_expanded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    assert model_source("~/model", "random").name == str(directory)


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_any_kind_of_tokenizer_file_will_do(directory: Path, tokenizer: str) -> None:
    (directory / "tokenizer.json").rename(directory / tokenizer)
    assert model_source(str(directory), "random").name == str(directory)


@pytest.mark.parametrize("text", ["./nowhere", "/nowhere/model", "~/nowhere", "a/b/c", "nowhere/config.json"])
def test_a_path_to_nothing_is_told_apart_from_a_hub_id(text: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        model_source(text, "random")


def test_a_missing_path_says_how_far_it_exists(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        model_source(str(tmp_path / "no" / "model"), "random")
    assert caught.value.hint == f"The path exists up to {tmp_path}."


@pytest.mark.parametrize(
    ("text", "said"),
    [("./" + "x" * 300, "cannot be accessed: File name too long"), ("~no-one/model", "home directory in the model")],
)
def test_a_path_that_cannot_be_looked_at_says_why(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        model_source(text, "random")


@pytest.mark.parametrize("text", ["", "  ", "two words", "org/na:me", "a--b", "name.git"])
def test_what_can_be_neither_path_nor_hub_id_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        model_source(text, "random")


def test_a_directory_without_a_config_is_refused(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        model_source(str(directory), "random")


def test_an_adapter_is_not_taken_for_a_model_and_not_overlooked_beside_one(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}", encoding="utf-8")
    for named in (directory, directory / "config.json"):
        with pytest.raises(UnreadError, match="has a model and a PEFT adapter"):
            model_source(str(named), "random")
    (directory / "config.json").unlink()
    with pytest.raises(InputError, match="PEFT adapter"):
        model_source(str(directory), "random")
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "org/model"}', encoding="utf-8")
    with pytest.raises(InputError, match="PEFT adapter") as caught:
        model_source(str(directory), "random")
    assert caught.value.hint == "It was trained on org/model: give that."
    with pytest.raises(UnreadError, match="PEFT adapter"):
        model_source(str(directory), "random", loads_adapters=True)


def test_a_directory_without_a_tokenizer_is_refused(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        model_source(str(directory), "random")


def test_a_file_that_is_no_config_is_refused(directory: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json is a file, but no config\.json"):
        model_source(str(directory / "tokenizer.json"), "random")


def test_a_pipe_is_neither_a_model_directory_nor_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a directory nor a file"):
        model_source(str(tmp_path / "pipe"), "random")


def test_a_model_that_transformers_saved_is_taken_with_its_weights(small_model_directory: Path) -> None:
    assert model_source(str(small_model_directory), "pretrained").init == "pretrained"


def test_a_directory_in_which_nothing_can_be_looked_at_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a path that is nearly as long as one can be, no file can be named, whoever asks.
    monkeypatch.chdir(tmp_path)
    long, most = tmp_path, os.pathconf("/", "PC_PATH_MAX") - 6
    while (left := most - len(str(long))) > 1:
        long /= "d" * min(left - 1, 200)
        Path(long.name).mkdir()
        os.chdir(long.name)
    for source in (lambda: model_source(long, "random"), lambda: dataset_source(long)):
        with pytest.raises(InputError, match="cannot be accessed: File name too long"):
            source()
