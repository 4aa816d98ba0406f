"""Rows with a token that the model does not embed are refused in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError
from tests.small import small_tokenizer, write_rows, write_small_model
from tests.step.requests import prepared_here

NEW = "<|new|>"


@pytest.mark.parametrize(
    ("trainer", "row", "named"),
    [
        ("sft", {"input_ids": [3, 1000]}, "1,000"),
        ("sft", {"input_ids": [3, -1]}, "-1"),
        ("sft", {"input_ids": [3, -100, 1000]}, "-100"),
        ("sft", {"text": f"said {NEW}"}, NEW),
        ("reward", {"chosen": f"a {NEW}", "rejected": "b"}, NEW),
        ("kto", {"prompt": f"a {NEW}", "completion": "b", "label": True}, NEW),
        ("grpo", {"prompt": f"a {NEW}", "completion": "b"}, NEW),
    ],
)
def test_a_token_that_the_model_does_not_embed_is_told_where_the_rows_have_it(
    tmp_path: Path, trainer: str, row: dict[str, Any], named: str
) -> None:
    tokenizer = small_tokenizer()
    count = len(tokenizer)
    model = write_small_model(tmp_path / "model", weights=False, vocab_size=count)
    tokenizer.add_tokens([NEW])
    tokenizer.save_pretrained(model)
    plain = {name: {"input_ids": [3, 4], "label": True}.get(name, "plain") for name in row}

    def rows_read(row: dict[str, Any]) -> int:
        file = write_rows(tmp_path / "rows.jsonl", [plain, plain, row])
        source = DatasetSource("rows.jsonl", "json", str(file))
        request = PrepareRequest(ModelSource(str(model)), source, trainer, str(tmp_path / "tokenized"))
        return prepared_here(request, tmp_path / "prepare").dataset.documents.rows

    assert rows_read(plain) == 3
    token = named if named != NEW else rf"{count} \(<\|new\|>\)"
    said = rf"rows.jsonl has the token id {token}, and .*model has embeddings for {count} tokens: training crashes"
    with pytest.raises(InputError, match=said):
        rows_read(row)
