"""Rows that are easily got wrong, from ``autotune probe`` to two steps of TRL's command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import autotune, train_with_trl

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def text(words: int, number: int = 0) -> str:
    return " ".join(f"word{(number * 7 + place) % 50}" for place in range(words))


def chat(number: int) -> dict[str, Any]:
    contents = {"system": text(4), "user": text(3 + number % 30, number), "assistant": text(number % 40, number)}
    return {"messages": [{"role": role, "content": content} for role, content in contents.items()]}


def answer(number: int) -> dict[str, Any]:
    return {"prompt": text(6, number), "completion": " " + text(1 + number % 40, number)}


COUNT = 96
ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "one row a hundred times longer": ("sft", [{"text": text(400 if place == 60 else 4)} for place in range(COUNT)]),
    "the longest row last": ("sft", [{"text": text(5 + (place == COUNT - 1) * 200)} for place in range(COUNT)]),
    "all equal but one": ("sft", [{"text": text(40 + (place == 9))} for place in range(COUNT)]),
    "one token": ("sft", [{"text": "a"}] * COUNT),
    "duplicates": ("sft", [{"text": text(60)}] * COUNT),
    "empty completions": ("sft", [answer(place) | ({} if place % 3 else {"completion": ""}) for place in range(COUNT)]),
    "roles": ("sft", [chat(place) for place in range(COUNT)]),
    "empty answers": (
        "dpo",
        [
            {"prompt": text(6, place), "chosen": " " + text(place % 40, place), "rejected": text(place % 4, place)}
            for place in range(COUNT)
        ],
    ),
    "an odd number of answers": ("kto", [{**answer(place), "label": place % 2 == 0} for place in range(COUNT - 1)]),
    "desirable answers alone": ("kto", [{**answer(place), "label": True} for place in range(COUNT)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_a_recommendation_is_confirmed_and_trains_unchanged(
    kind: str, small_model_directory: Path, tmp_path: Path
) -> None:
    trainer, rows = ROWS[kind]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ("--trainer", trainer, "--device", "cpu", "--effort", "quick", "--memory-budget", "2GiB", "--trials", "4")
    more = ("--fix", "precision=float32", "--json", "--output", "bundle")
    ended = autotune("probe", small_model_directory, "rows.jsonl", *words, *more, folder=tmp_path, timeout=600)
    assert ended.code == 0, ended.err
    assert (ended.document["status"], ended.document["confirmed"]) == ("found", True)
    train_with_trl(trainer, tmp_path)
