"""Images that rows name by the paths of their files are tokenised, traced and checked as those inside the rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, List, Value, load_from_disk
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotune.core.protocol import PrepareReply, PrepareRequest
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.probing import JobServer, prepare
from autotune.step.images.sizes import ImageSize, image_sizes
from tests.step.test_images_tokenised import PICTURED
from tests.vision import picture, small_processor, write_small_vision_model

MESSAGES = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a model"}]


def named(*files: str) -> Dataset:
    """Return rows with one image each, by its path or as encoded text."""
    return Dataset.from_dict({"messages": [MESSAGES] * len(files), "image": list(files)})


def sizes_of(rows: Dataset) -> list[ImageSize]:
    return [size for sizes in image_sizes(rows, "rows") for size in sizes]


def prepared(server: JobServer, rows: Path, folder: Path, trainer: str = "sft") -> PrepareReply:
    model = ModelSource(str(write_small_vision_model(folder / "model", "gemma3", weights=False)))
    source = DatasetSource("rows", "json" if rows.suffix == ".jsonl" else "parquet", str(rows))
    return prepare(
        server, PrepareRequest(model, source, trainer, str(folder / rows.with_suffix("").name)), folder / "prepare"
    )


@pytest.mark.parametrize("trainer", sorted(PICTURED))
def test_rows_with_paths_become_those_with_the_images_inside(
    job_server: JobServer, trainer: str, tmp_path: Path
) -> None:
    files = [str(tmp_path / f"{number}.png") for number in range(4)]
    for number, file in enumerate(files):
        picture(30 + 20 * number, 90 - 10 * number).save(file)
    inside = PICTURED[trainer]([files[:1], files[1:3], files[3:]])
    inside.to_parquet(str(tmp_path / "inside.parquet"))
    with (tmp_path / "paths.jsonl").open("w", encoding="utf-8") as stream:
        for row, images in zip(inside.remove_columns("images"), (files[:1], files[1:3], files[3:]), strict=True):
            stream.write(json.dumps({**row, "images": images}) + "\n")
    expected, found = (
        prepared(job_server, tmp_path / name, tmp_path, trainer).dataset for name in ("inside.parquet", "paths.jsonl")
    )
    assert found.fingerprint == expected.fingerprint
    assert found.images is not None
    assert found.images.pixels.counts == {30 * 90: 1, 50 * 80: 1, 70 * 70: 1, 90 * 60: 1}
    assert load_from_disk(str(tmp_path / "paths"))["images"][1] == files[1:3]


def test_a_path_is_taken_from_the_folder_in_which_the_process_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(30, 20).save(tmp_path / "a.png")
    rows = named("a.png", str(tmp_path / "a.png"))
    with pytest.raises(InputError, match=r"Row 1 of rows names the image a\.png, which is no file") as refused:
        sizes_of(rows)
    assert str(Path.cwd()) in refused.value.hint
    monkeypatch.chdir(tmp_path)
    assert sizes_of(rows) == [ImageSize(30, 20)] * 2


@pytest.mark.parametrize("form", ["{}", "data:image/png;base64,{}"])
def test_an_image_encoded_as_text_has_the_size_that_a_processor_reads(form: str, tmp_path: Path) -> None:
    picture(300, 200).save(tmp_path / "a.png")
    rows = named(form.format(base64.b64encode((tmp_path / "a.png").read_bytes()).decode()))
    assert sizes_of(rows) == [ImageSize(300, 200)]
    collator = DataCollatorForVisionLanguageModeling(small_processor("llava_next"))
    as_text, as_image = (
        collator([{"messages": MESSAGES, "image": image}]) for image in (rows[0]["image"], picture(300, 200))
    )
    assert as_text["pixel_values"].shape == as_image["pixel_values"].shape


def test_a_broken_encoded_image_is_quoted_in_part() -> None:
    with pytest.raises(InputError, match=r"Row 1 of rows has an image that cannot be read: AAAA+…: ") as refused:
        sizes_of(named("AAAA" * 100))
    assert len(refused.value.message) < 250


def test_images_on_the_web_are_left_open() -> None:
    with pytest.raises(UnreadError, match=r"Row 1 of rows has an image on the web, https://example\.com/a\.png"):
        sizes_of(named("https://example.com/a.png"))


def test_a_row_without_a_path_is_named() -> None:
    rows = Dataset.from_dict({"image": ["a.png", None]}).select([1])
    with pytest.raises(InputError, match="Row 1 of rows has no image"):
        sizes_of(rows)


@pytest.mark.parametrize(("column", "feature"), [("image", List(Value("string"))), ("images", Value("string"))])
def test_a_list_of_paths_under_the_name_of_one_image_is_refused(
    job_server: JobServer, column: str, feature: Any, tmp_path: Path
) -> None:
    values = [["a.png"] if isinstance(feature, List) else "a.png"] * 2
    Dataset.from_dict({"messages": [MESSAGES] * 2, column: values}).to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(InputError, match=rf"rows has images \(column {column}\), and the values .* not images"):
        prepared(job_server, tmp_path / "rows.parquet", tmp_path)
