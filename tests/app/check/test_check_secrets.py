"""A check shows no secret of its file, of its command, or of a file that it rewrites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.app.arguments import CheckArguments
from autotune.app.check.check import check
from autotune.app.check.fix import fix_legacy
from autotune.confidential import PLACEHOLDER
from autotune.core.documents.verdict import Outcome
from autotune.core.files.codec import encode
from autotune.emit.document import json_text
from autotune.userconfig.written import read_written
from tests.app.check.conftest import Checked, Write, cache_of

SECRET = "planted0secret"
BODY = f"""\
hub_token: {SECRET}1  # was {SECRET}1
env: {{HF_TOKEN: {SECRET}2}}
model_init_kwargs: {{token: {SECRET}3}}
max_length: 64
per_device_train_batch_size: 1
"""


def files_with_secrets(folder: Path) -> list[Path]:
    """Return the files in a folder that have a planted secret."""
    return [file for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


@pytest.mark.slow
def test_neither_the_verdict_nor_the_cache_has_a_secret(
    checked: Checked, write: Write, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = str(write("sft", BODY))
    found = checked(config=file, trainer="sft", gpu="H100-80GB")
    assert found.outcome is Outcome.FITS
    again = checked(config=file, trainer="sft", gpu="H100-80GB")
    assert again.from_cache
    assert SECRET not in json_text(found) + json_text(again)
    # A remedy is shown as the difference of this text.
    read = read_written(file, "sft").file
    assert read is not None
    assert PLACEHOLDER in read.text
    assert SECRET not in read.text
    assert files_with_secrets(cache_of(tmp_path_factory)) == []


def test_the_words_of_a_command_are_told_without_their_secrets(checked: Checked, write: Write) -> None:
    file = str(write("sft", "warmup_steps: 1\n"))
    words = (f"HF_TOKEN={SECRET}4", "trl", "sft", "--config", file, "--hub_token", f"{SECRET}5", "--sead", "1")
    found = checked(command=words, fits=False)
    assert SECRET not in json.dumps(encode(found))
    assert found.settings["command"] == ("HF_TOKEN=***", *words[1:6], "***", "--sead", "1")
    assert SECRET not in repr(read_written(None, command=words))


@pytest.mark.parametrize(
    "words",
    [(f"HF_TOKEN={SECRET}", "accelerate", "launch"), (f"--api-key={SECRET}",), ("train.py", "--password", SECRET)],
)
def test_a_command_that_cannot_be_read_is_told_without_its_secrets(words: tuple[str, ...]) -> None:
    found = check(CheckArguments(words))
    assert found.outcome is Outcome.CANNOT_RUN
    assert SECRET not in json.dumps(encode(found))


@pytest.mark.parametrize("key", [f"hub_token: [{SECRET}]", f"hub_token: {SECRET}\nlearning_rate: &{SECRET} x"])
def test_what_is_wrong_with_a_file_is_told_without_its_secrets(key: str, checked: Checked, write: Write) -> None:
    found = checked(config=str(write("sft", f"{key}\n")), trainer="sft", fits=False)
    assert found.outcome is Outcome.CANNOT_RUN
    assert SECRET not in json.dumps(encode(found))


def test_a_file_that_is_rewritten_keeps_its_secrets_and_its_difference_shows_none(write: Write) -> None:
    file = write("sft", f"hub_token: {SECRET}\nmax_seq_length: 64\npush_to_hub_token: {SECRET}\n")
    fixed = fix_legacy(str(file), trainer="sft")
    assert "+max_length: 64" in fixed.diff
    assert SECRET not in repr(fixed)
    assert file.read_text(encoding="utf-8").count(SECRET) >= 1
    assert f"hub_token: {SECRET}\nmax_length: 64\n" in file.read_text(encoding="utf-8")
