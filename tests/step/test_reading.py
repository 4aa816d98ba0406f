"""Rows are read by the fields of TRL's configuration: tokens and labels equal TRL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.workload import DatasetSource, ModelSource, Workload
from autotune.errors import InputError
from autotune.trainers import find_trainer
from tests.small import (
    CHAT_TEMPLATE,
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
TEMPLATE = "{% for message in messages %}<|user|>wordy {{ message.content }} ## {% endfor %}{{ mood }}"
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
PAIR = ("chosen_ids", "rejected_ids")
FEW = {"max_length": None, "use_cpu": True, "bf16": False, "report_to": "none"}


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """Prepare rows for a model whose tokenizer has no chat template but, where it is given, its own."""

    def run(rows: Rows, trainer: str = "sft", *, own: str | None = None, **reading: object) -> Workload:
        model = write_small_model(tmp_path / "model", weights=False, chat_template=False)
        tokenizer = small_tokenizer(chat_template=False)
        tokenizer.chat_template = own
        tokenizer.save_pretrained(model)
        file = write_rows(tmp_path / "rows.jsonl", rows)
        source = DatasetSource("rows.jsonl", "json", str(file), reading=reading)
        request = PrepareRequest(ModelSource(str(model)), source, trainer, str(tmp_path / "tokenized"))
        return prepared_here(request, tmp_path / "prepare")

    return run


def sft_rows(rows: Rows, folder: Path, **args: Any) -> Dataset:
    """Return rows as TRL tokenises them."""
    return SFTTrainer(
        model=AutoModelForCausalLM.from_config(small_config()),
        args=SFTConfig(str(folder / "reference"), **FEW, **args),
        train_dataset=Dataset.from_list(rows),
        processing_class=small_tokenizer(chat_template=False),
    ).train_dataset


def reward_rows(rows: Rows, folder: Path, **args: Any) -> Dataset:
    """Return pairs as TRL tokenises them for a reward model."""
    return RewardTrainer(
        model=AutoModelForSequenceClassification.from_config(small_config(num_labels=1)),
        args=RewardConfig(str(folder / "reference"), **FEW, **args),
        train_dataset=Dataset.from_list(rows),
        processing_class=small_tokenizer(chat_template=False),
    ).train_dataset


def check_same(reply: Workload, made: Dataset, columns: Sequence[str] = ("input_ids", "labels")) -> None:
    saved = load_from_disk(reply.dataset.tokenized_directory)
    for column in columns:
        assert saved[column][:] == made[column][:]


def test_messages_are_written_by_the_template_that_the_configuration_names(
    prepared: Prepare, template: str, tmp_path: Path
) -> None:
    rows = messages_rows(TEXTS)
    with pytest.raises(InputError, match="has no chat template"):
        prepared(rows)
    check_same(prepared(rows, chat_template_path=template), sft_rows(rows, tmp_path, chat_template_path=template))


def test_the_column_of_text_is_the_one_that_the_configuration_names(prepared: Prepare, tmp_path: Path) -> None:
    rows = [{"content": text, "text": "short"} for text in TEXTS]
    reply = prepared(rows, dataset_text_field="content")
    assert reply.dataset.format == "text"
    check_same(reply, sft_rows(rows, tmp_path, dataset_text_field="content"))


@pytest.mark.parametrize(
    ("rows", "reading"),
    [
        (prompt_completion_rows(TEXTS), {"completion_only_loss": False}),
        (text_rows([f"{text}<|user|>" for text in TEXTS]), {"eos_token": "<|user|>"}),
        (text_rows(TEXTS), {"eos_token": "<|user|>"}),
    ],
    ids=["completion_only_loss", "eos_token at the end", "eos_token"],
)
def test_tokens_and_labels_follow_the_configuration(
    prepared: Prepare, rows: Rows, reading: dict[str, Any], tmp_path: Path
) -> None:
    check_same(prepared(rows, **reading), sft_rows(rows, tmp_path, **reading))


def test_the_loss_counts_the_answers_alone_where_the_configuration_has_it_so(prepared: Prepare, tmp_path: Path) -> None:
    file = tmp_path / "marked.jinja"
    file.write_text(MARKED)
    rows, reading = messages_rows(TEXTS), {"assistant_only_loss": True, "chat_template_path": str(file)}
    check_same(prepared(rows, **reading), sft_rows(rows, tmp_path, **reading))


@pytest.mark.parametrize("without", [(0, 1, 2, 3), (0, 2), (1, 3)], ids=["none", "not the first", "the first"])
def test_rows_without_messages_are_read_as_text_if_there_is_some(
    prepared: Prepare, template: str, without: tuple[int, ...], tmp_path: Path
) -> None:
    texts = TEXTS[:4]
    rows = [{**text, **row} for text, row in zip(text_rows(texts), messages_rows(texts), strict=True)]
    rows = [{**row, "messages": None} if place in without else row for place, row in enumerate(rows)]
    reading = {"chat_template_path": template}
    check_same(prepared(rows, **reading), sft_rows(rows, tmp_path, **reading))


def test_an_empty_list_beside_text_is_told_as_trl_ends_at_it(prepared: Prepare, tmp_path: Path) -> None:
    rows = [{**row, "chosen": []} for row in text_rows(TEXTS)]
    with pytest.raises(IndexError):
        sft_rows(rows, tmp_path)
    with pytest.raises(InputError, match=r"Row 1 of rows.jsonl has an empty list in chosen, whose first message TRL"):
        prepared(rows)


def test_rows_without_the_answers_that_the_loss_is_to_count_are_refused_as_by_trl(prepared: Prepare) -> None:
    with pytest.raises(
        InputError, match=r"TRL refuses rows\.jsonl: .*`assistant_only_loss=True`, .* not conversational"
    ):
        prepared(text_rows(TEXTS), assistant_only_loss=True)


@pytest.mark.parametrize("trainer", ["dpo", "kto", "reward"])
def test_a_prompt_of_text_beside_answers_of_messages_is_told(prepared: Prepare, trainer: str) -> None:
    answer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    message = r"rows.jsonl has text in prompt, and messages in chosen and rejected: .*remove those of one kind"
    with pytest.raises(InputError, match=message):
        prepared([{"prompt": "a", "chosen": answer, "rejected": answer}] * 2, trainer)


def test_pairs_of_a_reward_model_are_written_by_the_template_that_the_configuration_names(
    prepared: Prepare, template: str, tmp_path: Path
) -> None:
    rows = [{"chosen": one["messages"], "rejected": other["messages"]} for one, other in _pairs()]
    reply = prepared(rows, "reward", chat_template_path=template)
    check_same(reply, reward_rows(rows, tmp_path, chat_template_path=template), PAIR)


def test_conversations_beside_texts_are_left_out_without_a_chat_template(prepared: Prepare, tmp_path: Path) -> None:
    asked = [{"from": "human", "value": "a"}]
    rows = [{"chosen": text, "rejected": "b", "conversations": asked} for text in TEXTS]
    check_same(prepared(rows, "reward"), reward_rows(rows, tmp_path), PAIR)


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_prompts_are_written_with_the_words_that_the_configuration_gives_the_template(
    prepared: Prepare, trainer: str
) -> None:
    rows = [{"prompt": row["messages"][:1]} for row in messages_rows(TEXTS)]
    reply = prepared(rows, trainer, own=TEMPLATE, chat_template_kwargs={"mood": "calm and collected"})
    texts = [f"<|user|>wordy {row['prompt'][0]['content']} ## calm and collected" for row in rows]
    saved = load_from_disk(reply.dataset.tokenized_directory)
    assert saved["prompt_ids"][:] == small_tokenizer()(texts)["input_ids"]


def test_a_column_that_is_not_there_is_told_with_the_field_that_names_it(prepared: Prepare) -> None:
    with pytest.raises(InputError, match=r"lacks columns that SFT needs: it has text\.") as raised:
        prepared(text_rows(TEXTS), dataset_text_field="content")
    assert raised.value.hint.endswith("; dataset_text_field names content in place of text.")


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_an_end_or_a_padding_that_is_not_a_token_is_told(prepared: Prepare, name: str) -> None:
    with pytest.raises(InputError, match=rf"{name} is <\|nothing\|>, which is not a token of .*model"):
        prepared(text_rows(TEXTS), **{name: "<|nothing|>"})


def test_an_empty_padding_is_the_tokenizer_s_own_as_in_trl(prepared: Prepare) -> None:
    assert prepared(text_rows(TEXTS), pad_token="").dataset.documents.rows == len(TEXTS)


@pytest.mark.parametrize("trainer", ["dpo", "reward", "sft"])
def test_what_trl_checks_of_a_padding_token_is_read_of_its_configuration(trainer: str) -> None:
    assert "pad_token" in find_trainer(trainer).config_fields.reading


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ messages[0].content + 1 }}", "can only concat"),
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
    ],
)
def test_a_template_that_cannot_write_a_row_is_told_by_its_name(
    prepared: Prepare, text: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "strict.jinja"
    file.write_text(text)
    with pytest.raises(InputError, match=rf"chat template .*strict.jinja refuses a row of rows.jsonl: {reason}"):
        prepared(messages_rows(TEXTS), chat_template_path=str(file))
    with pytest.raises(InputError, match=rf"refuses a row of rows.jsonl: {reason}"):
        prepared(messages_rows(TEXTS), own=text)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*messages_rows(TEXTS), {"messages": []}], "rows.jsonl has no messages in 1 of 13 rows, .* is row 13"),
        (
            [*messages_rows(TEXTS), {"messages": [None]}],
            r"TRL cannot read row 13 \(counted from 1\) of rows.jsonl: KeyError",
        ),
        ([*text_rows(TEXTS), {"text": 5}], "TRL cannot read row 13 .*'int'"),
    ],
)
def test_a_row_that_differs_from_the_first_is_told(prepared: Prepare, rows: Rows, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepared(rows, own=CHAT_TEMPLATE)


def _pairs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    rows = messages_rows(TEXTS)
    return list(zip(rows, reversed(rows), strict=True))
