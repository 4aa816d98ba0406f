"""The real command with the real API, without a whole search."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.boundary import run
from autotune.core.documents.catalogue import CatalogueRow
from autotune.core.files.codec import decode
from autotune.trainers import trainers


def command(*words: object) -> int:
    """Run the command in this process and return its exit code."""
    return run(["autotune", *map(str, words)])


@pytest.mark.parametrize("trainer", trainers())
def test_the_catalogue_has_every_technique_and_says_why_one_is_missing_here(
    trainer: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert command("techniques", "--trainer", trainer, "--device", "cpu", "--json") == 0
    rows = [decode(CatalogueRow, item) for item in json.loads(capfdbinary.readouterr().out)]
    assert [row.knob for row in rows] == [technique.name for technique in trainers()[trainer].techniques]
    missing = [option for row in rows for option in row.options if not option.available]
    assert missing
    assert all(option.reason for option in missing)
    assert all(option.reason == "" for row in rows for option in row.options if option.available)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fix", "packin=bfd"], "Did you mean 'packing'?"),
        (["--trainer", "sfd"], "sfd"),
        (["--trainer", "ppo"], "TRL has no trainer 'ppo' since release 1.13."),
        (["--trainer", "nash_md"], "TRL has no trainer 'nash_md' since release 1.14."),
    ],
)
def test_a_wrong_value_is_told_in_one_message(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("probe", tmp_path, tmp_path, *words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert "Traceback" not in shown.err


def test_a_missing_model_is_named(small_dataset_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("probe", tmp_path / "nowhere", small_dataset_file, "--output", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "nowhere" in said
    assert "Traceback" not in said


def test_a_storage_that_does_not_answer_ends_a_search_before_anything_is_read(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("probe", small_model_directory, small_dataset_file, "--output", tmp_path / "out")
    assert command(*words, "--storage", "sqlite:////no/such/directory/study.db") == 2
    said = capsys.readouterr().err
    assert "Reading " not in said
    assert "unable to open database file" in said


@pytest.mark.slow
def test_a_time_limit_ends_the_reading_of_model_and_rows(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--device", "cpu", "--timeout", "1s", "--output", tmp_path / "out")
    assert command("probe", small_model_directory, small_dataset_file, *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"Nothing was measured in --timeout 1s. Reading {small_model_directory} and tokenising" in said
    assert "Give more time, or fewer rows." in said


@pytest.mark.slow
def test_ctrl_c_while_the_model_is_read_prints_how_to_go_on(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    words = ["probe", str(small_model_directory), str(small_dataset_file), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "autotune", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert any(line.startswith("Reading ") for line in running.stderr)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out) == (130, "")
    assert err.rstrip().endswith(f"--output {tmp_path / 'out'} --resume")
    assert "Traceback" not in err
