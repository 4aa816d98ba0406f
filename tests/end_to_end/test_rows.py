"""Error-prone rows (long prompts, images) from ``autotune probe`` to two steps of TRL's command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from autotune.trainers import trainers
from tests.end_to_end.runs import Ended, autotune, by_script, by_trl, train
from tests.small import write_rows
from tests.step.test_images_tokenised import PICTURED
from tests.vision import WITH_TORCHVISION, picture, write_small_vision_model


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
def test_a_recommendation_on_hard_rows_is_confirmed_and_trains_unchanged(
    kind: str, small_model_directory: Path, tmp_path: Path
) -> None:
    trainer, rows = ROWS[kind]
    write_rows(tmp_path / "rows.jsonl", rows)
    words = ("--trainer", trainer, "--device", "cpu", "--effort", "quick", "--memory-budget", "2GiB", "--trials", "4")
    more = ("--fix", "precision=float32", "--json", "--output", "bundle")
    ended = autotune("probe", small_model_directory, "rows.jsonl", *words, *more, folder=tmp_path, timeout=600)
    assert ended.code == 0, ended.err
    assert (ended.document["status"], ended.document["confirmed"]) == ("found", True)
    train(by_trl(trainer), tmp_path)


pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: {trainer}
techniques:
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
"""
SIZES = ("max_completion_length=8", "num_generations=2", "per_device_train_batch_size=4")
LONG = 7
"""The row, from 0 on, that is longer than all others."""
PROMPTS = [
    {"prompt": " ".join(["memory"] * (150 if place == LONG else 3 + place % 9)), "solution": f"{place}"}
    for place in range(40)
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("found")
    (folder / "space.yaml").write_text(SPACE.format(trainer="grpo"), encoding="utf-8")
    rows = write_rows(folder / "rows.jsonl", PROMPTS)
    words = ("--trainer", "grpo", "--prompt-coverage", "0.97", "--device", "cpu", "--effort", "quick", "--no-plan")
    fixed = [word for size in SIZES for word in ("--fix", size)]
    more = ("--space", "space.yaml", "--trials", "2", "--global-batch-size", "4", "--json", "--output", "bundle")
    return autotune("probe", small_model_directory, rows, *words, *fixed, *more, folder=folder), folder / "bundle"


def test_what_was_dropped_is_told_and_part_of_the_result(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    dropped = ended.document["workload"]["dataset"]["dropped"]
    assert (dropped["rows"], [number for number, _ in dropped["longest"]]) == (1, [LONG + 1])
    note = next(note for note in ended.document["notes"] if note.startswith("--prompt-coverage 0.97"))
    assert "drops 1 of the 40 prompts" in note
    assert f"row {LONG + 1} ({dropped['longest'][0][1]} tokens)" in note
    assert note in " ".join(ended.err.split())


def test_the_bundle_has_the_other_rows_as_they_were(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    rows = load_dataset("parquet", data_files=str(bundle / "rows.parquet"), split="train")
    assert rows.to_list() == [row for place, row in enumerate(PROMPTS) if place != LONG]


@pytest.mark.parametrize("script", [False, True], ids=["trl", "script"])
def test_training_starts_with_them_unchanged(script: bool, found: tuple[Ended, Path]) -> None:
    _, bundle = found
    train(by_script("train.py") if script else by_trl("grpo", bundle / "config.yaml"), bundle)


GROUPS = ("max_completion_length=8", "num_generations=2")


@pytest.mark.parametrize(
    ("trainer", "family"),
    [
        *((name, "gemma3") for name, known in trainers().items() if known.takes_images),
        *(
            pytest.param(*case, marks=pytest.mark.skipif(not WITH_TORCHVISION, reason="it is loaded with torchvision"))
            for case in (("sft", "qwen3_vl"), ("grpo", "qwen2_5_vl"))
        ),
    ],
)
def test_a_recommendation_on_images_is_confirmed_and_trains_unchanged(
    trainer: str, family: str, tmp_path: Path
) -> None:
    model = write_small_vision_model(tmp_path / "model", family)
    files = [str(tmp_path / f"{number}.png") for number in range(16)]
    for number, file in enumerate(files):
        picture(30 + 5 * number, 90 - 4 * number).save(file)
    # GRPO takes no rows without images among those with some.
    fewest = int(trainer == "grpo")
    images = [[files[place], files[-place]][: max(fewest, place % 3)] for place in range(16)]
    PICTURED[trainer](images).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "space.yaml").write_text(SPACE.format(trainer=trainer), encoding="utf-8")
    words = ("--trainer", trainer, "--device", "cpu", "--effort", "quick", "--no-plan", "--memory-budget", "2GiB")
    fixed = [word for fix in (GROUPS if trainers()[trainer].generates else ()) for word in ("--fix", fix)]
    more = ("--space", "space.yaml", "--trials", "2", "--global-batch-size", "4", "--json", "--output", "bundle")
    ended = autotune("probe", model, "rows.parquet", *words, *fixed, *more, folder=tmp_path, timeout=600)
    assert ended.code == 0, ended.err
    assert (ended.document["status"], ended.document["confirmed"]) == ("found", True)
    train(by_trl(trainer), tmp_path)
