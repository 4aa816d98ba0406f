"""Any text in place of JSON is read, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.app.report import report
from autotune.core.files.codec import DecodeError, decode
from autotune.core.files.json_text import read_json
from autotune.core.spread import Interval
from autotune.errors import InputError
from autotune.inspection.model import model_source
from autotune.inspection.rows import check_lines
from autotune.techniques.peft_config import PeftConfig

HOSTILE = {
    "deep": '{"a": ' + "[" * 100 + "]" * 100 + "}",
    "deeper": "[" * 100_000,
    "long": '{"a": ' + "9" * 5_000 + "}",
}
NOT_FINITE = ('{"schema": NaN}', '{"schema": -Infinity}', '{"schema": 1e999}')


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_document_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|too many digits"):
        read_json(text)
    for name in ("result.json", "config.json", "rows.jsonl"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"result\.json"):
        report(tmp_path)
    with pytest.raises(InputError, match=r"config\.json"):
        model_source(str(tmp_path), "random")
    if not text.startswith("["):
        with pytest.raises(InputError, match=r"Line 1 of .*rows\.jsonl is not a JSON object: "):
            check_lines(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="peft_config"):
        PeftConfig().parse(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("text", NOT_FINITE)
def test_a_number_that_is_not_finite_is_refused_except_where_libraries_take_it(text: str, tmp_path: Path) -> None:
    for name in ("result.json", "config.json", "rows.jsonl"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"result\.json is not JSON: a number has too many digits or is not finite"):
        report(tmp_path)
    with pytest.raises(InputError, match="peft_config"):
        PeftConfig().parse(str(tmp_path / "rows.jsonl"))
    # Such as time_step_limit of Mamba 2, which transformers writes.
    with pytest.raises(InputError, match="has no tokenizer"):
        model_source(str(tmp_path), "random")
    check_lines(tmp_path / "rows.jsonl")


def test_a_document_that_opens_many_brackets_beside_one_another_is_read() -> None:
    value = {"rows": [[number] for number in range(1000)], "deep": json.loads("[" * 60 + "]" * 60)}
    assert read_json(json.dumps(value)) == value


def test_a_number_that_is_too_large_is_none_of_a_document() -> None:
    with pytest.raises(DecodeError, match=r"Number out of range - at `\$\.low`"):
        decode(Interval, {"low": 10**400, "high": 1.0})
