"""The spellings of a dataset, and faults that are reported before anything is started."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from autotune.core.workload import DatasetSource
from autotune.emit.rows import _card
from autotune.errors import InputError, UnreadError
from autotune.inspection.dataset import check_file, check_one_load, dataset_source, evaluation_source, training_source

GOOD = b'{"text": "one"}\n{"text": "two"}\n'


def write(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return str(file)


def load(source: DatasetSource) -> Any:
    """Load a source as TRL does (trl/scripts/utils.py, get_dataset)."""
    import datasets

    return datasets.load_dataset(path=source.path, data_files=source.data_files, split=source.split)


def arrow_stream() -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"text": ["one", "two"]})
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("text", ["imdb", "trl-lib/tldr"])
def test_a_name_that_is_not_on_this_disk_is_a_hub_id(text: str) -> None:
    assert dataset_source(text) == DatasetSource(name=text, path=text)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", GOOD),
        ("blank-lines.jsonl", b'\n{"text": "one"}\n\n{"text": "two"}\n \n'),
        ("byte-order-mark.jsonl", b"\xef\xbb\xbf" + GOOD),
        ("no-last-newline.jsonl", GOOD.rstrip()),
        ("array.jsonl", b'[\n{"text": "one"},\n{"text": "two"}\n]'),
        ("DATA.JSONL", GOOD),
        ("lines.json", GOOD),
        ("array.json", b'[{"text": "one"}, {"text": "two"}]'),
        ("texts.json", b'["one", "two"]'),
        ("data.csv", b"text\none\ntwo\n"),
        ("data.txt", b"one\ntwo\n"),
        ("data.arrow", arrow_stream()),
    ],
)
def test_a_file_that_passes_loads_as_two_rows_with_datasets(tmp_path: Path, name: str, content: bytes) -> None:
    source = dataset_source(write(tmp_path / name, content))
    assert list(load(source)["text"]) == ["one", "two"]


@pytest.mark.parametrize("name", ["data.txt", "data.arrow"])
def test_a_folder_of_text_or_of_arrow_is_read_too(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, arrow_stream() if name.endswith("arrow") else b"one\ntwo\n")
    assert list(load(dataset_source(tmp_path))["text"]) == ["one", "two"]


def test_a_parquet_file_passes_and_loads(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "data.parquet")
    source = dataset_source(str(tmp_path / "data.parquet"))
    assert (source.path, load(source).num_rows) == ("parquet", 2)


def test_a_byte_order_mark_within_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    joined = write(tmp_path / "joined.jsonl", GOOD + b"\xef\xbb\xbf" + GOOD)
    with pytest.raises(InputError, match=r"Line 3 of .*joined.jsonl is not a JSON object: Unexpected UTF-8 BOM"):
        check_file(Path(joined), lines=True)


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    write(tmp_path / "0abc", GOOD)
    (tmp_path / "train.jsonl").symlink_to("0abc")
    source = dataset_source(tmp_path / "train.jsonl")
    assert source.data_files == str(tmp_path / "train.jsonl")
    assert list(load(source)["text"]) == ["one", "two"]


def test_a_directory_is_loaded_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "first.jsonl", b'{"text": "one"}\n')
    write(tmp_path / "second.jsonl", b'{"text": "two"}\n')
    write(tmp_path / ".hidden.jsonl", b"not looked at")
    source = dataset_source(str(tmp_path))
    assert source == DatasetSource(name=str(tmp_path), path=str(tmp_path))
    assert sorted(load(source)["text"]) == ["one", "two"]


def test_a_directory_and_a_hub_id_have_the_split_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", GOOD)
    source = dataset_source(tmp_path, "test")
    assert source == training_source(tmp_path, "test") == DatasetSource(str(tmp_path), str(tmp_path), split="test")
    assert list(load(source)["text"]) == ["one", "two"]
    assert dataset_source("trl-lib/tldr", "validation").split == "validation"
    assert evaluation_source(tmp_path, None, "validation", "test") == DatasetSource(
        f"{tmp_path} (validation)", str(tmp_path), split="validation"
    )


@pytest.mark.parametrize(
    ("dataset", "part", "said"),
    [
        ("rows.jsonl", ("test",), "rows.jsonl is a file, and has no split but train"),
        (None, ("test",), "--split needs a dataset"),
        ("rows.jsonl", (None, "main"), "rows.jsonl is a file, and has no configurations"),
        (None, (None, "main"), "--dataset-config needs a dataset"),
    ],
)
def test_a_split_or_a_configuration_that_cannot_be_taken_is_refused(
    dataset: str | None, part: tuple[str | None, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(said)):
        training_source(dataset, *part)


@pytest.mark.parametrize("dataset", ["rows.jsonl", "."])
def test_a_part_of_a_split_is_trained_on_where_nothing_is_evaluated(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    source = training_source(dataset, "train[:50%]")
    assert source is not None
    assert list(load(source)["text"]) == ["one"]
    # TRL's script looks both splits up in what it has loaded.
    with pytest.raises(InputError, match=re.escape("'train[:50%]' is not the name of a split")):
        check_one_load(source, source)


def test_the_rows_to_train_on_are_not_those_to_evaluate_on_by_their_split(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", GOOD)
    with pytest.raises(InputError, match="Evaluation rows and training rows are the same"):
        evaluation_source(tmp_path, None, "test", "test")


def test_a_path_object_is_taken_as_its_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    assert dataset_source(file) == dataset_source(str(file))
    assert evaluation_source(None, file, None) == evaluation_source(None, str(file), None)


def test_the_name_stays_what_the_user_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    assert dataset_source("data.jsonl") == DatasetSource("data.jsonl", "json", str(tmp_path / "data.jsonl"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "one"}\n{"text": "two"\n', r"Line 2 of .* is not a JSON object: .* at column 15"),
        (b'\n\n{"text": "one"}\n\nnonsense\n', r"Line 5 of .* is not a JSON object"),
        (b'{"text": "one"}\n["two"]\n', r"Line 2 of .* is not a JSON object: it has another type"),
        (b'{"text": "one"}\n{"text": "\xe4"}\n', r"Line 2 of .* is not a JSON object: 'utf-8' codec"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"Line 1 of .* is not a JSON object"),
        (b"", r"is empty"),
    ],
)
def test_the_first_fault_of_a_jsonl_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = Path(write(tmp_path / "data.jsonl", content))
    with pytest.raises(InputError, match=said):
        check_file(file, lines=True)


def test_a_broken_line_is_quoted_but_not_at_length(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        check_file(Path(write(tmp_path / "data.jsonl", GOOD + b"x" * 10_000)), lines=True)
    assert caught.value.hint == f"It reads: {'x' * 60}…"


@pytest.mark.parametrize("content", [b"3", b'{\n"text": ["one", "two"]\n}', b'["one",\n"two"]', b'{"text": '])
def test_the_lines_of_a_json_file_of_another_form_are_not_checked(tmp_path: Path, content: bytes) -> None:
    check_file(Path(write(tmp_path / "data.json", content)), lines=True)


@pytest.mark.parametrize("name", ["data.tsv", "data", "data.gz", "data.jsonl.zip"])
def test_another_suffix_is_refused_and_the_right_ones_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no format that autotune reads") as caught:
        dataset_source(write(tmp_path / name, GOOD))
    reads = ".jsonl, .json, .csv, .parquet, .arrow, .txt, each also compressed (.bz2, .gz, .xz, .zst)"
    assert caught.value.hint == f"It reads {reads}."


COMPRESSED: Mapping[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize(
    ("name", "content"), [("data.jsonl", GOOD), ("array.json", b'[{"text": "one"}, {"text": "two"}]'),
                          ("data.csv", b"text\none\ntwo\n")]
)  # fmt: skip
def test_a_compressed_file_loads_alone_and_in_a_folder(tmp_path: Path, name: str, content: bytes, suffix: str) -> None:
    source = dataset_source(write(tmp_path / f"{name}{suffix}", COMPRESSED[suffix](content)))
    assert source.data_files == str(tmp_path / f"{name}{suffix}")
    for found in (source, dataset_source(tmp_path)):
        assert list(load(found)["text"]) == ["one", "two"]


def test_zstandard_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "data.jsonl.zst", b"\x28\xb5\x2f\xfd and more")
    monkeypatch.setattr("autotune.inspection.rows.find_spec", lambda _: None)
    with pytest.raises(InputError, match="without the package zstandard"):
        dataset_source(file)
    monkeypatch.setattr("autotune.inspection.rows.find_spec", lambda _: object())
    assert dataset_source(file).path == "json"


@pytest.mark.parametrize("text", ["./nowhere.jsonl", "nowhere.jsonl", "org/nowhere.parquet", "/nowhere"])
def test_a_missing_file_is_told_apart_from_a_hub_id(text: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        dataset_source(text)


def test_the_directory_of_a_bundle_is_read_by_its_card_of_files_elsewhere(tmp_path: Path) -> None:
    rows = dataset_source(write(tmp_path / "rows.jsonl", GOOD))
    card = tmp_path / "data" / "README.md"
    card.parent.mkdir()
    card.write_text(_card({"train": rows, "test": rows}))
    assert list(load(dataset_source(card.parent))["text"]) == ["one", "two"]


def test_a_name_that_datasets_would_take_for_a_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in its name"):
        dataset_source(write(tmp_path / "data[1].jsonl", GOOD))


@pytest.mark.parametrize("beside", ["config.json", "generation_args.json", "dataset_infos.json"])
def test_other_json_files_beside_the_rows_of_a_directory_are_left_to_datasets(tmp_path: Path, beside: str) -> None:
    write(tmp_path / "train.jsonl", GOOD)
    write(tmp_path / beside, b"{\n}")
    assert list(load(dataset_source(tmp_path))["text"]) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_single_row_is_enough(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, json.dumps({"text": "one"}).encode())
    for source in (dataset_source(file), dataset_source(str(tmp_path))):
        assert list(load(source)["text"]) == ["one"]


def test_a_directory_that_datasets_saved_for_itself_is_refused_as_datasets_does(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="save_to_disk"):
        load(DatasetSource(name="saved", path=str(tmp_path / "saved")))
    with pytest.raises(InputError, match="save_to_disk"):
        dataset_source(str(tmp_path / "saved"))


def test_a_directory_of_saved_splits_is_left_open_as_its_reading_depends_on_datasets(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UnreadError, match="save_to_disk"):
        dataset_source(str(tmp_path / "saved"))


def test_rows_to_evaluate_on_are_a_split_or_another_dataset(tmp_path: Path) -> None:
    rows, others = (write(tmp_path / name, GOOD) for name in ("a.jsonl", "b.jsonl"))
    assert evaluation_source(rows, None, None) is None
    found = evaluation_source(rows, others, None)
    assert found == dataset_source(others)
    split = evaluation_source("trl-lib/tldr", None, "validation")
    assert split == DatasetSource("trl-lib/tldr (validation)", "trl-lib/tldr", split="validation")
    assert evaluation_source(rows, "trl-lib/tldr", None) == DatasetSource(
        "trl-lib/tldr (test)", "trl-lib/tldr", split="test"
    )


@pytest.mark.parametrize(
    ("dataset", "evaluation", "split", "message"),
    [
        ("a.jsonl", None, "test", "is a file, and has no split but train"),
        ("a.jsonl", "a.jsonl", None, "Evaluation rows and training rows are the same"),
        ("trl-lib/tldr", None, "train", "Evaluation rows and training rows are the same"),
        ("trl-lib/tldr", None, "train[90%:]", "is not the name of a split"),
        ("a.jsonl", "missing.jsonl", None, "missing.jsonl"),
        (None, None, "test", "--eval-split needs a dataset"),
    ],
)
def test_rows_that_cannot_be_evaluated_on_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str | None, evaluation: str | None, split: str | None,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(InputError, match=re.escape(message)):
        evaluation_source(dataset, evaluation, split)


def test_trl_loads_rows_to_train_and_to_evaluate_on_in_one_call(tmp_path: Path) -> None:
    rows, others = (dataset_source(write(tmp_path / name, GOOD)) for name in ("a.jsonl", "b.jsonl"))
    check_one_load(rows, others)
    hub = DatasetSource("trl-lib/tldr", "trl-lib/tldr")
    check_one_load(hub, replace(hub, split="test"))
    for train, test in (
        (rows, hub),
        (hub, rows),
        (hub, DatasetSource("imdb", "imdb")),
        (rows, replace(rows, path="csv")),
    ):
        with pytest.raises(InputError, match="`trl` cannot load"):
            check_one_load(train, test)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    file.write_bytes(GOOD)
    with pytest.raises(InputError, match=r"caf\\udce9.jsonl has a name that is not UTF-8"):
        dataset_source(str(file))
