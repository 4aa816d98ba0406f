"""Prices of GPUs are read from the user's file, or refused in one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.inspection.prices import read_prices

CSV, YAML = "prices.csv", "prices.yaml"


def written(directory: Path, name: str, text: str) -> Path:
    file = directory / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (YAML, "H100-80GB: 2.99\nrtx 4090: 0.4\n"),
        (YAML, "'H100 SXM': '2.99'\n'4090': 0.4\n"),
        (YAML, "h100: 2.99\n4090: 0.4\n"),
        (CSV, "H100-80GB,2.99\nRTX4090,0.4\n"),
        (CSV, "gpu,price\nH100-80GB, 2.99\n\nRTX4090, 0.40\n"),
        (CSV, "\ufeffgpu,price\r\nH100-80GB,2.99\r\nRTX4090,0.4\r\n"),
        (CSV, "\n,\ngpu,price\nH100-80GB,2.99\nRTX4090,0.4\n"),
    ],
)
def test_prices_are_found_by_any_name_of_a_gpu(name: str, text: str, tmp_path: Path) -> None:
    assert read_prices(written(tmp_path, name, text)) == {"H100-SXM": 2.99, "RTX4090": 0.4}


def test_a_file_of_prices_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, YAML, "H100-80GB: 2.99")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_prices(f"~/{YAML}") == {"H100-SXM": 2.99}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (YAML, "H1000: 2.99", "'H1000' is not a known GPU. There are T4, "),
        (YAML, "24GiB: 2.99", "'24GiB' is not a known GPU."),
        (YAML, "T4: cheap", "the price of T4 is 'cheap', which is not a number above zero."),
        (YAML, "T4: 0", "the price of T4 is 0, which is not a number above zero."),
        (YAML, "T4: -1.5", "is -1.5, which is not a number above zero."),
        (YAML, "T4: .nan", "is nan, which is not a number above zero."),
        (YAML, "T4: yes", "is True, which is not a number above zero."),
        (YAML, "T4: [1, 2]", "is [1, 2], which is not a number above zero."),
        (YAML, "T4:", "is None, which is not a number above zero."),
        (YAML, "H100: 2\nH100-SXM: 3", "has two prices of H100-SXM."),
        (YAML, "", "has no prices."),
        (YAML, "- T4", "does not map names of GPUs to prices."),
        (YAML, "T4: 1\n  L4: [", "prices.yaml, line 2: mapping values are not allowed here."),
        (YAML, f"T4: {'9' * 5000}", "line 1: '999"),
        (YAML, f"T4: {'9' * 399}", "which is not a number above zero."),
        (YAML, f"T4: {'[' * 5000}", "line 1: more than 64 collections are inside one another"),
        (YAML, "&a T4: [&b [*b], *b]", "line 1: "),
        (CSV, "T4,1,EUR", "line 1: 3 columns instead of two."),
        (CSV, "gpu,price\nT4,cheap", "the price of T4 is 'cheap'"),
        (CSV, "gpu,price", "has no prices."),
        (CSV, "T5,1", "'T5' is not a known GPU."),
    ],
)
def test_what_cannot_be_used_is_one_message(name: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        read_prices(written(tmp_path, name, text))
    assert said in str(raised.value)


def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.yaml does not exist. Name the file of prices"):
        read_prices(tmp_path / "nowhere.yaml")
    with pytest.raises(InputError, match="has a NUL character"):
        read_prices("prices\0.yaml")
    with pytest.raises(InputError, match="is a directory"):
        read_prices(tmp_path)
    (tmp_path / YAML).write_bytes(b"\xff\xfe T4: 1")
    with pytest.raises(InputError, match="is not UTF-8"):
        read_prices(tmp_path / YAML)
