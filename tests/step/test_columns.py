"""Columns that a trainer leaves out, reads as text, or cannot read are named, with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.trainers import find_trainer
from tests.small import long_tailed_texts, messages_rows, preference_rows, small_tokenizer, write_small_model
from tests.trainers.prepared import prepared_rows

TEXTS = long_tailed_texts(4)
MESSAGES = [row["messages"] for row in messages_rows(TEXTS)]
APART = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
ALIKE = {name: [{"role": "user", "content": "a b"}, *answer] for name, answer in APART.items()}
WRITTEN = (
    r"rows.jsonl has messages written as text in text: TRL trains on this text as it is, without the chat template\."
)
Prepared = Callable[..., Workload]


@pytest.fixture
def prepared(small_model_directory: Path, tmp_path: Path) -> Prepared:
    def run(rows: list[dict[str, Any]], trainer: str = "sft", model: Path = small_model_directory) -> Workload:
        return prepared_rows(find_trainer(trainer), rows, model, tmp_path / "rows").reply

    return run


@pytest.mark.parametrize(
    ("trainer", "row", "left_out"),
    [
        (
            "sft",
            {"text": "a b", "id": 1, "source": "x"},
            "SFT trains on text of rows.jsonl, and leaves out id, source.",
        ),
        (
            "sft",
            {"prompt": "a", "completion": "b", "text": "c"},
            "SFT trains on prompt and completion of rows.jsonl, and leaves out text.",
        ),
        (
            "dpo",
            {"question": "who ?", "chosen": "a b", "rejected": "c d"},
            "DPO trains on chosen and rejected of rows.jsonl, and leaves out question.",
        ),
        (
            "kto",
            {"prompt": "a", "completion": "b", "label": True, **dict.fromkeys("uvwxyz", 1)},
            "KTO trains on prompt and completion and label of rows.jsonl, and leaves out u, v, w, x, y and 1 more.",
        ),
        ("reward", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}, None),
        ("grpo", {"prompt": "a", "solution": "b"}, None),
        ("sft", {"messages": MESSAGES[0], "tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        ("sft", {"input_ids": [3, 4], "seq_lengths": [1, 1]}, None),
    ],
)
def test_columns_that_a_trainer_leaves_out_are_named(
    prepared: Prepared, trainer: str, row: dict[str, Any], left_out: str | None
) -> None:
    found = prepared([row] * 4, trainer).dataset.remarks
    assert [text for text in found if "leaves out" in text] == ([] if left_out is None else [left_out])


@pytest.mark.parametrize("written", [json.dumps, str], ids=["JSON", "Python"])
def test_messages_that_are_written_as_text_are_told_to_be_trained_on_as_text(
    prepared: Prepared, written: Callable[[object], str]
) -> None:
    (remark,) = prepared([{"text": written(messages)} for messages in MESSAGES]).dataset.remarks
    assert remark.startswith(WRITTEN.replace("\\", ""))
    with pytest.raises(InputError, match=r"holds messages written as text in messages\. Write the rows as JSON lines"):
        prepared([{"messages": written(messages)} for messages in MESSAGES])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": "[3, 4, 5]"}, r"values of the type \w*string in input_ids, where TRL reads a list of numbers"),
        ({"input_ids": [0.5, 1.0]}, r"values of the type list<.*double> in input_ids"),
        ({"text": "a b", "labels": 1}, r"values of the type int64 in labels, .*\. Write such lists .*, or rename"),
    ],
)
def test_a_column_of_tokens_that_holds_something_else_is_told(
    prepared: Prepared, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepared([row] * 3)


@pytest.mark.parametrize(
    ("trainer", "row", "message"),
    [
        ("reward", {"chosen": "a", "rejected": "b", "margin": "0.5"}, r"type \w*string in margin, where TRL reads num"),
        (
            "kto",
            {"prompt": "a", "completion": "b", "label": "yes"},
            r"type \w*string in label, where TRL reads numbers",
        ),
    ],
)
def test_text_in_place_of_a_number_is_told(prepared: Prepared, trainer: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepared([row] * 2, trainer)


def test_documents_that_rows_hold_already_are_remarked_upon(prepared: Prepared) -> None:
    (remark,) = prepared([{"input_ids": [3, 4, 5], "seq_lengths": [1, 2]}] * 2).dataset.remarks
    assert remark.startswith(
        "rows.jsonl has seq_lengths: TRL keeps the documents of a row apart only with padding_free"
    )


def test_conversations_with_the_words_of_messages_are_to_be_renamed(prepared: Prepared) -> None:
    with pytest.raises(InputError, match="Rename `conversations` to `messages` where its messages have role"):
        prepared([{"conversations": messages} for messages in MESSAGES])


@pytest.mark.parametrize(
    ("trainer", "rows", "message"),
    [
        ("dpo", [{"chosen": "a b", "rejected": "a c"}, {"chosen": "", "rejected": "a"}], r"read row 2 \(counted from"),
        # TRL counts the two answers of a pair as rows.
        ("kto", [{"chosen": "", "rejected": "a c"}], r"cannot read a row of rows.jsonl: .*may one be empty"),
        ("dpo", [APART] * 2, r"answers in row 1 of rows.jsonl begin with different messages\. TRL takes the common"),
        ("dpo", [ALIKE, APART], r"row 2 .*Error: .* Look for .* or their first messages differ\."),
        ("grpo", [{"prompt": "a b"}, {"prompt": MESSAGES[0][:1]}], "cannot read a row of rows.jsonl: TypeError"),
        ("sft", [{"conversations": []}], r"has no conversations in 1 of 1 rows, .* is row 1 "),
        ("dpo", [{**row, "tools": "none"} for row in preference_rows(TEXTS)], r"row 1 \(.*JSONDecodeError: "),
    ],
)
def test_the_row_that_trl_cannot_read_is_named(
    prepared: Prepared, trainer: str, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepared(rows, trainer)


@pytest.mark.parametrize(
    ("trainer", "row", "absent", "message"),
    [
        ("grpo", {"prompt": "a b"}, ("eos_token",), "no end-of-sequence token, with which a completion ends"),
        ("grpo", {"prompt": MESSAGES[0][:1]}, ("eos_token",), "no end-of-sequence token, with which a completion ends"),
        ("dpo", {"chosen": "a b", "rejected": "a c"}, ("eos_token",), "no end-of-sequence token, which TRL adds"),
        ("kto", ALIKE, ("eos_token", "pad_token"), "neither a pad_token nor an eos_token"),
    ],
)
def test_a_tokenizer_without_the_tokens_that_a_training_needs_is_told(
    prepared: Prepared, tmp_path: Path, trainer: str, row: dict[str, Any], absent: Sequence[str], message: str
) -> None:
    model, tokenizer = write_small_model(tmp_path / "endless", weights=False), small_tokenizer()
    for name in absent:
        setattr(tokenizer, name, None)
    tokenizer.save_pretrained(model)
    with pytest.raises(InputError, match=message):
        prepared([row] * 2, trainer, model)


def test_prompts_without_a_token_among_others_are_named(prepared: Prepared) -> None:
    (remark,) = prepared([{"prompt": ""}, {"prompt": "a b"}], "grpo").dataset.remarks
    assert remark.startswith("1 prompt of rows.jsonl has no token: training crashes where")
