"""Rows with images are refused in one sentence, whichever trainer they are for, and text among them is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from autotune.core.protocol import PrepareReply, PrepareRequest
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.probing import JobServer, prepare
from autotune.step.data.images import check_no_images
from autotune.trainers import trainers
from tests.trainers.samples import sample_rows

Rows = list[dict[str, Any]]
Prepare = Callable[..., PrepareReply]
SOURCE = DatasetSource("rows", "json")


@pytest.fixture
def prepared(job_server: JobServer, small_model_directory: Path, tmp_path: Path) -> Prepare:
    def run(trainer: str, rows: Rows, evaluated: Rows | None = None) -> PrepareReply:
        sources = [
            DatasetSource(name, "parquet", str(written(tmp_path / f"{name}.parquet", of)))
            for name, of in (("rows", rows), ("others", evaluated or rows))
        ]
        evaluation = sources[1] if evaluated is not None else None
        where = [str(tmp_path / name) for name in ("tokenized", "evaluation")]
        request = PrepareRequest(
            ModelSource(str(small_model_directory)), sources[0], trainer, where[0], evaluation, where[1]
        )
        return prepare(job_server, request, tmp_path / "prepare")

    return run


def written(file: Path, rows: Rows) -> Path:
    Dataset.from_list(rows).to_parquet(str(file))
    return file


def said(*parts: object) -> Rows:
    return [{"prompt": [{"role": "user", "content": part}]} for part in parts]


TEXT = {"type": "text", "text": "What is this?"}
IMAGE = {"type": "image", "image": "cat.png"}


@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("trainer", sorted(trainers()))
def test_a_column_of_images_is_refused_by_name_of_the_trainer(prepared: Prepare, trainer: str, column: str) -> None:
    rows = sample_rows(trainer, trainers()[trainer].formats[-1].name)
    # Some are probed on images; the small model has no processor of them.
    taken = trainers()[trainer].takes_images
    reason = "the model has no processor" if taken else f"{trainers()[trainer].label} on rows of text alone"
    with pytest.raises(InputError, match=rf"rows has images \(column {column}\), and .*{reason}") as refused:
        prepared(trainer, [{**row, column: [b"png"]} for row in rows])
    # TRL may well train on them, so that a check does not call it wrong.
    assert isinstance(refused.value, UnreadError) is not taken


def test_rows_with_images_to_evaluate_on_are_refused_too(prepared: Prepare) -> None:
    rows = sample_rows("grpo", "prompt")
    with pytest.raises(InputError, match=r"others has images \(column images\)"):
        prepared("grpo", rows, [{**row, "images": [b"png"]} for row in rows])


@pytest.mark.parametrize(
    "rows",
    [
        said([IMAGE, {**IMAGE, "image": "dog.png"}], [IMAGE]),
        said([{"type": "image", "text": None}, TEXT], [TEXT]),
        said([{"type": "image_url", "text": None}, TEXT], [TEXT]),
    ],
)
def test_an_image_in_a_message_is_refused(rows: Rows) -> None:
    with pytest.raises(InputError, match=r"rows has images \(in messages of prompt\)"):
        check_no_images(SOURCE, Dataset.from_list(rows), ["prompt"])


def test_an_image_in_a_message_is_refused_where_the_rows_are_of_mixed_types() -> None:
    for rows in (said("Look.", [IMAGE, TEXT]), said([TEXT], [TEXT, {"type": "image"}])):
        mixed = Dataset.from_list(rows, on_mixed_types="use_json")
        with pytest.raises(InputError, match=r"rows has images \(in messages of prompt\)"):
            check_no_images(SOURCE, mixed, ["prompt"])


@pytest.mark.parametrize(
    "rows",
    [
        said("a", "b"),
        said([TEXT], [TEXT, TEXT]),
        said([{"type": "text", "text": "image"}], [TEXT]),
        [{"prompt": "an image", "type": "image"}],
    ],
)
def test_text_is_taken_whatever_it_says_of_images(rows: Rows) -> None:
    check_no_images(SOURCE, Dataset.from_list(rows), ["prompt"])


def test_text_of_mixed_types_is_taken() -> None:
    mixed = Dataset.from_list(said('an "image"', [TEXT, {"type": "text"}]), on_mixed_types="use_json")
    check_no_images(SOURCE, mixed, ["prompt"])
