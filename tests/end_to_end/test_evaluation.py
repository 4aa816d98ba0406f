"""Evaluation rows from the command line to ``trl`` and ``train.py``, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Ended, autotune, by_script, by_trl, train
from tests.small import long_tailed_texts, text_rows, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: sft
techniques:
  max_length: [coverage]
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
  per_device_train_batch_size: [2, 8]
  per_device_eval_batch_size: [4, 8]
"""
EVALUATED = [8] * 9 + [96]
"""Words of each row to evaluate on."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "train.jsonl", text_rows(long_tailed_texts(40, longest_words=40)))
    write_rows(folder / "test.jsonl", text_rows([" ".join(["memory"] * words) for words in EVALUATED]))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path, data: Path) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("found")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    words = ("--eval-split", "test", "--device", "cpu", "--effort", "quick", "--no-plan", "--space", "space.yaml")
    ended = autotune(
        "probe", small_model_directory, data, *words, "--trials", "4", "--json", "--output", "bundle", folder=folder
    )
    return ended, folder / "bundle"


def test_every_probe_evaluates_and_the_winner_saved(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    document: Any = ended.document
    winner = document["recommended"]
    assert document["confirmed"]
    assert list(winner["peaks"]) == ["construction", "micro-batch", "optimizer step", "evaluate", "save"]
    assert winner["evaluation_seconds"] > 0
    assert document["baseline"]["evaluation_seconds"] > 0
    lengths = {int(length): rows for length, rows in document["workload"]["evaluation"]["lengths"]["counts"].items()}
    assert sum(lengths.values()) == len(EVALUATED)
    # The rows to train on are shorter; those to evaluate on are cut by no more than the token coverage allows.
    assert max(map(int, document["workload"]["dataset"]["lengths"]["counts"])) < winner["max_length"] <= max(lengths)


def test_trl_trains_and_evaluates_with_the_configuration_unchanged(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    assert "eval_loss" in train(by_trl("sft", bundle / "config.yaml"), bundle)


def test_the_script_trains_and_evaluates_by_itself(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    assert "eval_loss" in train(by_script("train.py"), bundle)


def test_two_files_are_planned_for(small_model_directory: Path, data: Path, tmp_path: Path) -> None:
    words: list[str | Path] = ["plan", small_model_directory, data / "train.jsonl", "--gpu", "24GiB", "--explain"]
    fixed = ("gradient_checkpointing=on", "attention=sdpa", "liger=off", "per_device_train_batch_size=1",
             "precision=float32", "optimizer=adamw_torch", "padding_free=off", "packing=none")  # fmt: skip
    words += [word for fix in (*fixed, "lora=none") for word in ("--fix", fix)]
    plain = autotune(*words, "--json", "--all", folder=tmp_path)
    more = autotune(*words, "--eval-dataset", data / "test.jsonl", "--json", "--all", folder=tmp_path)
    assert (plain.code, more.code) == (0, 0), plain.err + more.err
    assert {item["candidate"]["per_device_eval_batch_size"] for item in plain.document["estimates"]} == {8}
    sizes = {item["candidate"]["per_device_eval_batch_size"] for item in more.document["estimates"]}
    assert sizes == {1, 2, 4, 8, 16, 32}
    parts = [peak["part"]["phase"] for peak in more.document["explanation"]["peaks"]]
    assert parts[-2:] == ["evaluate", "save"]
    assert "evaluate" not in [peak["part"]["phase"] for peak in plain.document["explanation"]["peaks"]]


def test_a_split_that_is_not_there_is_the_users_to_mend(
    small_model_directory: Path, data: Path, tmp_path: Path
) -> None:
    ended = autotune(
        "probe", small_model_directory, data, "--eval-split", "validation", "--device", "cpu", folder=tmp_path
    )
    assert ended.code == 2
    assert "has no split 'validation'" in ended.err
    assert "It has train, test." in " ".join(ended.err.split())
