"""Images of unusual sizes, modes and places get the tokens and image data of TRL's collator."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Image, List, Value, load_from_disk
from PIL import ExifTags
from PIL import Image as Pillow
from trl import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetProfile, DatasetSource, ModelSource, Rollouts, Workload
from autotune.errors import InputError, UnreadError
from autotune.step.data.dataset import LoadedRows
from autotune.step.data.profile import dataset_profile
from autotune.step.images.sizes import ImageSize, image_sizes
from autotune.step.trainers import find_adapter
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from tests.settings import pictured_workload
from tests.step.requests import prepared_here
from tests.step.test_images_tokenised import PICTURED, rows_of
from tests.vision import FAMILIES, picture, small_processor, write_small_vision_model

WIDE, FLAT = (90, 30), 2000
TURNED, MOVING = "turned.jpg", "moving.gif"
ODD: dict[str, Callable[[Path], None]] = {
    "pixel.png": lambda file: picture(1, 1).save(file),
    TURNED: lambda file: picture(*WIDE).save(file, exif=turned(6)),
    "mirrored.jpg": lambda file: picture(*WIDE).save(file, exif=turned(2)),
    "cmyk.jpg": lambda file: picture(*WIDE).convert("CMYK").save(file),
    MOVING: lambda file: picture(*WIDE).save(file, save_all=True, append_images=[picture(*WIDE), picture(9, 9)]),
    "palette.png": lambda file: picture(*WIDE).convert("P").save(file),
    "transparent.png": lambda file: picture(*WIDE).convert("LA").save(file),
    "deep.png": lambda file: Pillow.fromarray(np.zeros(WIDE[::-1], dtype=np.uint16)).save(file),
}
MANY = 40


def turned(orientation: int) -> Any:
    exif = Pillow.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def cut_off(kind: str) -> bytes:
    """Return a file of which the second half is missing, with all of its header."""
    content, noise = BytesIO(), np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Pillow.fromarray(noise).save(content, kind)
    return content.getvalue()[: content.tell() // 2]


def collator_of(family: str) -> DataCollatorForVisionLanguageModeling:
    return DataCollatorForVisionLanguageModeling(small_processor(family))


def by_path(files: list[list[str]]) -> Dataset:
    """Return rows that name the files of their images."""
    return rows_of(files).remove_columns("images").add_column("images", files)


def tokenised(family: str, rows: Dataset) -> Dataset:
    trainer = SimpleNamespace(train_dataset=rows, data_collator=collator_of(family), args=SFTConfig)
    return find_adapter("sft").tokenized(trainer, Rollouts(), "rows")


def profile_of(rows: Dataset, found: Dataset) -> DatasetProfile:
    trainer = find_trainer("sft")
    request = PrepareRequest(ModelSource("model"), DatasetSource("rows", "parquet"), "sft", "tokenized")
    (messages,) = (form for form in trainer.formats if form.name == "messages")
    return dataset_profile(request, LoadedRows(rows, messages), found)


BY_PATH = ("gemma3", by_path), ("qwen2_5_vl", by_path)


@pytest.mark.parametrize(("family", "stored"), [*((family, rows_of) for family in FAMILIES), *BY_PATH])
def test_odd_images_become_what_the_collator_makes_of_them(
    family: str, stored: Callable[[list[list[str]]], Dataset], tmp_path: Path
) -> None:
    collator = collator_of(family)
    # Where torchvision is installed, it opens the paths of Qwen's images, and refuses this one.
    refused = {MOVING} if stored is by_path and collator.processor.image_processor.backend == "torchvision" else {}
    files = [str(tmp_path / name) for name in ODD if name not in refused]
    for file in map(Path, files):
        ODD[file.name](file)
    rows = stored([[], *([file] for file in files), files, files[:1] * MANY])
    found = tokenised(family, rows)
    for row, made in zip(rows, found, strict=True):
        real = collator([row])
        assert made["input_ids"] == real["input_ids"][0].tolist()
        assert made["labels"] == real["labels"][0].tolist()
        assert made["image_elements"] == [real["pixel_values"].numel() if "pixel_values" in real else 0]
    images = profile_of(rows, found).images
    assert images is not None
    assert images.in_row.counts == {0: 1, 1: len(files), len(files): 1, MANY: 1}


def test_a_turned_image_has_the_tokens_of_its_other_side(tmp_path: Path) -> None:
    ODD[TURNED](tmp_path / TURNED)
    upright = [[picture(*WIDE[::-1])], [picture(*WIDE)]]
    expected, stored = tokenised("llava_next", rows_of(upright))["input_ids"]
    for rows in (rows_of([[str(tmp_path / TURNED)]]), by_path([[str(tmp_path / TURNED)]])):
        assert sizes_of(rows) == [ImageSize(*WIDE[::-1])]
        (found,) = tokenised("llava_next", rows)["input_ids"]
        assert found == expected != stored


def test_a_row_whose_image_a_processor_refuses_is_named_with_its_reason() -> None:
    rows = rows_of([[picture(9, 9)], [picture(FLAT, 4)]])
    with pytest.raises(ValueError, match="absolute aspect ratio must be smaller than 200"):
        collator_of("qwen2_5_vl")([rows[1]])
    refused = "Row 2 of rows cannot be trained on by TRL: absolute aspect ratio must be smaller than 200"
    with pytest.raises(InputError, match=refused):
        tokenised("qwen2_5_vl", rows)


@pytest.mark.parametrize("stored", [rows_of, by_path])
@pytest.mark.parametrize(
    "content", [b"", b"no image", b"\x89PNG\r\n\x1a\n\x00\x00", *map(cut_off, ("PNG", "JPEG", "GIF"))]
)
def test_a_broken_file_is_an_error_that_names_its_row(
    stored: Callable[[list[list[str]]], Dataset], content: bytes, tmp_path: Path
) -> None:
    picture(9, 9).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(content)
    rows = stored([[str(tmp_path / "a.png")], [], [str(tmp_path / name) for name in ("a.png", "b.png")]])
    with pytest.raises(InputError, match=r"Row 3 of rows has an image that cannot be read: .*b\.png: "):
        tokenised("gemma3", rows)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_one_large_image_among_a_thousand_pixels_is_in_the_worst_micro_batch(tmp_path: Path) -> None:
    side, pixels, place = 8000, 1000, 617
    # Of black and white pixels the file is small, and a processor makes as much of it as of any.
    Pillow.new("1", (side, side)).save(tmp_path / "large.png")
    picture(1, 1).save(tmp_path / "pixel.png")
    files = [[str(tmp_path / "pixel.png")]] * pixels
    rows = by_path([*files[:place], [str(tmp_path / "large.png")], *files[place:]])
    profile = profile_of(rows, tokenised("qwen2_5_vl", rows))
    assert profile.images is not None
    assert profile.images.pixels.counts == {1: pixels, side * side: 1}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_length": None}
    base = pictured_workload()
    of = replace(base, dataset=profile)
    geometry = whole_geometry(find_trainer("sft"), TrainingPlan("sft", sizes, {}), of)
    assert place in geometry.worst.chosen
    real = collator_of("qwen2_5_vl")([rows[row] for row in geometry.worst.chosen])
    assert geometry.worst.tokens == real["input_ids"].shape[1]
    elements = profile.images.row_summary.image_elements
    assert elements is not None
    assert elements[list(geometry.worst.chosen)].sum() == real["pixel_values"].numel()
    # Nearly every micro-batch of an epoch has the pixels alone.
    assert sum(size.share for size in geometry.sizes if place not in size.shape.chosen) > 0.5


MESSAGES = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a model"}]


def named(*files: str) -> Dataset:
    """Return rows with one image each, by its path or as encoded text."""
    return Dataset.from_dict({"messages": [MESSAGES] * len(files), "image": list(files)})


def sizes_of(rows: Dataset, backend: str = "pil") -> list[ImageSize]:
    """Return the sizes of the images of rows for an image processor with a backend of transformers."""
    return [size for sizes in image_sizes(rows, SimpleNamespace(backend=backend), "rows") for size in sizes or ()]


def prepared_file(rows: Path, folder: Path, trainer: str = "sft") -> Workload:
    model = ModelSource(str(write_small_vision_model(folder / "model", "gemma3", weights=False)))
    source = DatasetSource("rows", "json" if rows.suffix == ".jsonl" else "parquet", str(rows))
    return prepared_here(
        PrepareRequest(model, source, trainer, str(folder / rows.with_suffix("").name)), folder / "prepare"
    )


@pytest.mark.parametrize("trainer", sorted(PICTURED))
def test_rows_with_paths_become_those_with_the_images_inside(trainer: str, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{number}.png") for number in range(4)]
    for number, file in enumerate(files):
        picture(30 + 20 * number, 90 - 10 * number).save(file)
    inside = PICTURED[trainer]([files[:1], files[1:3], files[3:]])
    inside.to_parquet(str(tmp_path / "inside.parquet"))
    with (tmp_path / "paths.jsonl").open("w", encoding="utf-8") as stream:
        for row, images in zip(inside.remove_columns("images"), (files[:1], files[1:3], files[3:]), strict=True):
            stream.write(json.dumps({**row, "images": images}) + "\n")
    expected, found = (
        prepared_file(tmp_path / name, tmp_path, trainer).dataset for name in ("inside.parquet", "paths.jsonl")
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
    with pytest.raises(InputError, match=r"Row 1 of rows names the image a\.png, which is not a file") as refused:
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


NO_TORCHVISION = {
    "a.bmp": "the format BMP", "a.tiff": "the format TIFF", "moving.gif": "2 frames", "moving.webp": "2 frames",
}  # fmt: skip
"""Files of which ``torchvision.io.decode_image`` makes no single image (seen with torchvision 0.28), and why."""


def write_picture(file: Path) -> Path:
    several: dict[str, Any] = {"save_all": True, "append_images": [picture(9, 9)]} if file.stem == "moving" else {}
    Pillow.effect_noise((9, 9), 50).convert("RGB").save(file, **several)
    return file


@pytest.mark.parametrize("name", NO_TORCHVISION)
def test_a_path_is_refused_where_the_processor_opens_it_with_torchvision_which_cannot(
    name: str, tmp_path: Path
) -> None:
    file = str(write_picture(tmp_path / name))
    rows = named(file)
    assert len(sizes_of(rows)) == 1
    with pytest.raises(InputError, match=rf"Row 1 of rows has an image of {NO_TORCHVISION[name]}, .*: {file}") as found:
        sizes_of(rows, "torchvision")
    assert "save the image as PNG or JPEG" in found.value.hint
    assert len(sizes_of(rows.cast_column("image", Image()), "torchvision")) == 1


TAKEN = ("a.jpg", "moving.png", "a.gif", "a.webp", "moving.mpo")


@pytest.mark.parametrize("name", [*NO_TORCHVISION, *TAKEN])
def test_an_image_processor_with_torchvision_opens_those_files_alone_as_one_image(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision: make test-nvidia")
    from transformers import Qwen2VLImageProcessor

    try:
        shape = tuple(Qwen2VLImageProcessor().fetch_images(str(write_picture(tmp_path / name))).shape)
    except RuntimeError:
        shape = ()
    assert (shape == (3, 9, 9)) is (name in TAKEN)


@pytest.mark.parametrize("name", TAKEN)
def test_a_path_that_torchvision_decodes_to_one_image_is_taken(name: str, tmp_path: Path) -> None:
    assert sizes_of(named(str(write_picture(tmp_path / name))), "torchvision") == [ImageSize(9, 9)]


def test_images_on_the_web_are_left_open() -> None:
    with pytest.raises(UnreadError, match=r"Row 1 of rows has an image on the web, https://example\.com/a\.png"):
        sizes_of(named("https://example.com/a.png"))


def test_a_row_without_a_path_is_named() -> None:
    rows = Dataset.from_dict({"image": ["a.png", None]}).select([1])
    with pytest.raises(InputError, match="Row 1 of rows has no image"):
        sizes_of(rows)


@pytest.mark.parametrize(("column", "feature"), [("image", List(Value("string"))), ("images", Value("string"))])
def test_a_list_of_paths_under_the_name_of_one_image_is_refused(column: str, feature: Any, tmp_path: Path) -> None:
    values = [["a.png"] if isinstance(feature, List) else "a.png"] * 2
    Dataset.from_dict({"messages": [MESSAGES] * 2, column: values}).to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(InputError, match=rf"rows has images \(column {column}\), and the values .* not images"):
        prepared_file(tmp_path / "rows.parquet", tmp_path)
