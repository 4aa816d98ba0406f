"""Preparing a workload: TRL's own tokens and labels, true profiles, and a message for each fault."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset, load_from_disk
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import DatasetSource, Init, ModelSource, Workload
from autotune.errors import InputError
from autotune.step.data.dataset import load_rows
from autotune.step.data.profile import model_profile
from autotune.trainers import find_trainer
from tests.small import (
    long_tailed_texts,
    messages_rows,
    prompt_completion_rows,
    small_config,
    small_tokenizer,
    text_rows,
    write_rows,
    write_small_model,
)
from tests.step.requests import prepared_here

Rows = list[dict[str, Any]]
Prepare = Callable[..., Workload]
TEXTS = long_tailed_texts(12)


def conversations_rows(texts: list[str]) -> Rows:
    return [{"conversations": [{"from": "human", "value": "go on"}, {"from": "gpt", "value": text}]} for text in texts]


def conversational_prompt_rows(texts: list[str]) -> Rows:
    return [
        {
            "prompt": [{"role": "user", "content": f"say {i}"}],
            "completion": [{"role": "assistant", "content": text}],
        }
        for i, text in enumerate(texts)
    ]


FORMATS: dict[str, tuple[str, Rows]] = {
    "text": ("text", text_rows(TEXTS)),
    "messages": ("messages", messages_rows(TEXTS)),
    "prompt and completion": ("prompt+completion", prompt_completion_rows(TEXTS)),
    "conversational prompt and completion": ("prompt+completion", conversational_prompt_rows(TEXTS)),
    "conversations": ("conversations", conversations_rows(TEXTS)),
    "input_ids": ("input_ids", [{"input_ids": list(range(3, 3 + i))} for i in range(1, 9)]),
    "input_ids with labels": (
        "input_ids",
        [{"input_ids": list(range(3, 5 + i)), "labels": [-100, *range(4, 5 + i)]} for i in range(1, 9)],
    ),
}


@pytest.fixture
def prepared(small_model_directory: Path, tmp_path: Path) -> Prepare:
    def run(
        rows: Rows | None, *, model: Path | None = None, init: Init = "random", trainer: str = "sft", **source: Any
    ) -> Workload:
        file = tmp_path / "rows.jsonl"
        if rows is not None:
            write_rows(file, rows)
        request = PrepareRequest(
            model=ModelSource(str(model or small_model_directory), init),
            dataset=replace(DatasetSource("rows.jsonl", "json", str(file)), **source),
            trainer=trainer,
            tokenized_directory=str(tmp_path / "tokenized"),
        )
        return prepared_here(request, tmp_path / "prepare")

    return run


@pytest.mark.parametrize(("name", "rows"), FORMATS.values(), ids=FORMATS.keys())
def test_tokens_and_labels_are_those_that_trl_makes(prepared: Prepare, tmp_path: Path, name: str, rows: Rows) -> None:
    profile = prepared(rows).dataset
    saved = load_from_disk(profile.tokenized_directory)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_config(small_config()),
        args=SFTConfig(str(tmp_path / "reference"), max_length=None, use_cpu=True, bf16=False, report_to="none"),
        train_dataset=Dataset.from_list(rows),
        processing_class=small_tokenizer(),
    )
    assert saved["input_ids"][:] == trainer.train_dataset["input_ids"][:]
    assert saved["labels"][:] == trainer.train_dataset["labels"][:]
    assert profile.format == name
    assert profile.columns == tuple(rows[0])
    assert profile.lengths.tokens == sum(len(row) for row in saved["input_ids"])
    assert profile.trainable_tokens == sum(label != -100 for row in saved["labels"] for label in row)


def test_lengths_are_counted(prepared: Prepare) -> None:
    lengths = [5, 9, 5, 2, 9, 9]
    profile = prepared([{"input_ids": [3] * length} for length in lengths]).dataset
    assert profile.lengths == LengthDistribution({2: 1, 5: 2, 9: 3})


def test_only_the_rows_themselves_make_the_datasets_fingerprint(prepared: Prepare) -> None:
    first = prepared(text_rows(TEXTS)).dataset.fingerprint
    assert (
        prepared([{"text": row["text"], "source": "elsewhere"} for row in text_rows(TEXTS)]).dataset.fingerprint
        == first
    )
    assert prepared(text_rows(TEXTS[:-1])).dataset.fingerprint != first


def test_the_models_profile_is_that_of_the_model_that_is_built(prepared: Prepare, small_model_directory: Path) -> None:
    profile = prepared(text_rows(TEXTS)).model
    model = AutoModelForCausalLM.from_pretrained(small_model_directory)
    assert profile.parameters == model.num_parameters()
    assert (profile.model_type, profile.architecture) == ("llama", "LlamaForCausalLM")
    assert (profile.layers, profile.vocabulary, profile.max_positions) == (2, 512, 2048)
    assert profile.linear_modules == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    quantizable = (
        module for name, module in model.named_modules() if name.rpartition(".")[2] in profile.linear_modules
    )
    assert profile.quantizable == sum(module.weight.numel() for module in quantizable)
    assert profile.has_weights is True


def test_experts_and_conv1d_modules_are_found(prepared: Prepare, tmp_path: Path) -> None:
    experts = write_small_model(tmp_path / "moe", "qwen3_moe", weights=False)
    found = prepared(text_rows(TEXTS), model=experts).model
    assert found.fused_experts
    gpt2 = write_small_model(tmp_path / "gpt2", "gpt2", weights=False)
    profile = prepared(text_rows(TEXTS), model=gpt2).model
    assert profile.linear_modules == ("c_attn", "c_proj", "c_fc")
    assert (profile.has_weights, profile.fused_experts) == (False, False)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "a", "answer": "b"}] * 3,
            r"lacks columns that SFT needs: it has question, answer\..*It needs text",
        ),
        ([{"prompt": "a"}] * 3, r"lacks columns that SFT needs: it has prompt\."),
        (
            [{"version": 1, "data": [{"text": "a"}] * 3}],
            r"it has version, data\..*It is one JSON object, whose `data` holds a list of 3: TRL reads it as one row\.",
        ),
        (
            [{"instruction": "a", "input": "b", "output": "c"}] * 2,
            r"it has instruction, input, output\..*Rename `instruction` to `prompt` and `output` to `completion`",
        ),
        (
            [{"text": "a"}, {"text": None}, {"text": None}],
            r"rows.jsonl has no text in 2 of 3 rows, the first of which is row 2 \(counted from 1\)\.",
        ),
        ([{"text": 1}, {"text": 2}], r"Row 1 of rows.jsonl holds neither text nor messages in text\."),
        ([{"messages": "a"}, {"messages": "b"}], r"Row 1 of rows.jsonl holds neither text nor messages in messages\."),
        (
            [{"prompt": "a", **row} for row in messages_rows(TEXTS)],
            r"rows.jsonl has the column prompt, and no completion: .*Remove or rename prompt\.",
        ),
    ],
)
def test_rows_that_sft_cannot_use_are_told(prepared: Prepare, rows: Rows, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepared(rows)


def test_a_row_without_a_value_in_a_table_is_counted_without_the_header(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('text\na\n""\nb\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"1 of 3 rows, .* row 2 \(counted from 1, without the header\)"):
        prepared(None, path="csv", data_files=str(tmp_path / "rows.csv"))


@pytest.mark.parametrize(("words", "format_"), [(("role", "content"), "text"), (("from", "value"), "conversations")])
def test_conversations_beside_text_are_read_as_trl_reads_them(
    prepared: Prepare, words: tuple[str, str], format_: str
) -> None:
    rows = [{"conversations": [dict(zip(words, ("user", text), strict=True))], "text": text} for text in TEXTS]
    assert prepared(rows).dataset.format == format_


ASKED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def test_a_prompt_and_its_completion_are_read_before_conversations(prepared: Prepare) -> None:
    found = prepared([{**row, "conversations": ASKED} for row in conversational_prompt_rows(TEXTS)]).dataset
    assert (found.format, found.trainable_tokens < found.documents.tokens) == ("prompt+completion", True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a ", "completion": "b", "conversations": ASKED}, "text in .*, and messages in conversations: TRL"),
        ({"text": "a", "conversations": []}, "Row 1 of rows.jsonl has an empty list in conversations"),
    ],
    ids=["an EOS token in some processes alone", "an IndexError"],
)
def test_conversations_with_which_trl_reads_no_text_are_told(
    prepared: Prepare, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepared([row] * 3)


def test_a_single_row_is_enough(prepared: Prepare) -> None:
    assert prepared([{"text": "alone"}]).dataset.lengths.rows == 1


def test_prompts_of_which_no_tokenizer_makes_a_token_are_told(prepared: Prepare) -> None:
    with pytest.raises(InputError, match=r"No row of rows.jsonl has a token\. .*texts are not empty"):
        prepared([{"prompt": ""}] * 3, trainer="grpo")


def test_a_dataset_of_several_configurations_is_told_with_their_names(prepared: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    card = [f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("en", "fr")]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(card)}---\n")
    for name in ("en", "fr"):
        write_rows(folder / f"{name}.jsonl", text_rows(TEXTS))
    write_rows(folder / "fr.jsonl", text_rows(TEXTS[:1]))
    with pytest.raises(InputError, match=r"has several configurations\..*It has en, fr\. .*--dataset-config"):
        prepared(None, path=str(folder), data_files=None)
    with pytest.raises(InputError, match=r"has no configuration 'de'\..*It has en, fr\."):
        prepared(None, path=str(folder), data_files=None, config="de")
    assert prepared(None, path=str(folder), data_files=None, config="fr").dataset.documents.rows == 1


def test_an_empty_split_is_told_where_trl_loads_all_of_them(prepared: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_rows(folder / "train.jsonl", text_rows(TEXTS))
    (folder / "test.jsonl").write_text("")
    with pytest.raises(ValueError, match="test"):
        load_dataset(str(folder))
    with pytest.raises(InputError, match=r"The split test of .* has no rows: TRL loads all splits"):
        prepared(None, path=str(folder), data_files=None, all_splits=True)
    assert prepared(None, path=str(folder), data_files=None).dataset.documents.rows == len(TEXTS)


def test_a_missing_dataset_is_told(prepared: Prepare, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dataset no/such cannot be loaded"):
        prepared(text_rows(TEXTS), name="no/such", path="no/such")
    with pytest.raises(InputError, match=r"dataset rows.jsonl cannot be loaded"):
        prepared(None, data_files=str(tmp_path / "absent.jsonl"))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DatasetSource("rows.jsonl", "json", str(write_rows(tmp_path / "rows.jsonl", text_rows(TEXTS))))
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", blocked / "cache")
    with pytest.raises(InputError, match=r"cannot be loaded: .*blocked.* set HF_DATASETS_CACHE"):
        load_rows(find_trainer("sft"), source, small_tokenizer(), ModelSource("model"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "nothing_known"}, "configuration of .* cannot be loaded"),
        ({"architectures": None}, "names no architecture"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification, .*not a causal language model",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_told(
    prepared: Prepare, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = write_small_model(tmp_path / "odd", weights=False)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=message):
        prepared(text_rows(TEXTS), model=model)


@pytest.mark.parametrize(("model_type", "layers"), [("gemma3n_text", 8), ("gemma4_text", 16), ("jamba", 12)])
def test_models_with_shared_or_computed_layers_are_prepared(
    prepared: Prepare, tmp_path: Path, model_type: str, layers: int
) -> None:
    model = write_small_model(tmp_path / model_type, model_type, weights=False, num_hidden_layers=layers)
    found = prepared(text_rows(TEXTS), model=model)
    assert found.dataset.lengths.rows == len(TEXTS)
    assert len(found.model.layer_kinds) == found.model.layers == layers
    assert 1 < len(set(found.model.layer_kinds)) < layers


def test_a_model_whose_classes_divide_by_the_number_of_its_layers_less_one_is_prepared(
    prepared: Prepare, tmp_path: Path
) -> None:
    model = write_small_model(tmp_path / "rwkv", "rwkv", weights=False, num_hidden_layers=4)
    assert prepared(text_rows(TEXTS), model=model).model.layers == 4


def test_a_model_without_configuration_tokenizer_or_weights_is_told(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"configuration of .*empty cannot be loaded"):
        prepared(text_rows(TEXTS), model=tmp_path / "empty")
    with pytest.raises(InputError, match="has no tokenizer"):
        prepared(text_rows(TEXTS), model=write_small_model(tmp_path / "mute", weights=False, tokenizer=False))
    with pytest.raises(InputError, match="has no weights to load"):
        prepared(text_rows(TEXTS), model=write_small_model(tmp_path / "bare", weights=False), init="pretrained")


def test_reading_writes_to_the_folder_of_its_job_alone_so_that_nothing_is_left_of_one_that_is_killed(
    small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    file = write_rows(tmp_path / "rows.jsonl", text_rows(TEXTS))
    request = PrepareRequest(
        model=ModelSource(str(small_model_directory)),
        dataset=DatasetSource("rows.jsonl", "json", str(file)),
        trainer="sft",
        tokenized_directory=str(tmp_path / "tokenized"),
    )
    assert prepared_here(request, tmp_path).model.fingerprint


def test_where_a_tokenizer_was_read_does_not_change_the_models_fingerprint(
    small_model_directory: Path, tmp_path: Path
) -> None:
    config, source = AutoConfig.from_pretrained(small_model_directory), ModelSource(str(small_model_directory))
    found = set()
    for offline in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(small_model_directory)
        # transformers keeps whether HF_HUB_OFFLINE was set, and saves it.
        tokenizer.init_kwargs["local_files_only"] = offline
        found.add(model_profile(source, config, tokenizer, tmp_path).fingerprint)
    assert len(found) == 1
