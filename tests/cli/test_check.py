"""``autotune check`` on the command line: several files at once, JSON, and rewriting old keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.app.check import check as of_check
from autotune.cli.boundary import run
from autotune.core.configuration import ReadCommand
from autotune.errors import JobLostError
from autotune.userconfig.reading import read_command
from autotune.userconfig.written import WrittenConfig

OLD = "max_seq_length: 64\nmax_steps: 3\n"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A configuration with a key that TRL 0.20 removed."""
    file = tmp_path / "old.yaml"
    file.write_text(OLD, encoding="utf-8")
    return file


def check(*words: object) -> int:
    return run(("autotune", "check", *map(str, words), "--trainer", "sft"))


def test_old_keys_are_rewritten_and_the_change_is_shown(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(old, "--fix-legacy") == 0
    assert old.read_text(encoding="utf-8") == OLD.replace("max_seq_length", "max_length")
    out = capsys.readouterr().out
    assert "-max_seq_length: 64" in out
    assert "+max_length: 64" in out
    assert check(old, "--no-fit") == 0


def test_a_fixed_copy_names_both_files_and_the_check_of_the_other_keys(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = old.with_name("new.yaml")
    assert check(old, "--fix-legacy", "--output", new) == 0
    out = "".join(capsys.readouterr().out.split())
    assert f"---{old}+++{new}" in out
    assert f"wrote{new}.Itsotherkeysarenotchecked" in out


def test_what_is_left_to_do_by_hand_is_shown_and_is_no_success(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old.write_text(OLD + "max_length: 32\n", encoding="utf-8")
    assert check(old, "--fix-legacy") == 1
    assert "To do by hand:" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--no-fit", "--json", "--memory-budget 1GiB", "--when-unsure pass"])
def test_rewriting_checks_nothing_and_takes_no_option_of_a_check(
    words: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(old, "--fix-legacy", *words.split()) == 2
    option = words.split(maxsplit=1)[0]
    said = f"autotune: --fix-legacy takes no {option}. Fix the file first, then check it.\n"
    assert capsys.readouterr().err == said
    assert old.read_text(encoding="utf-8") == OLD


def test_one_file_is_rewritten_at_a_time(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(old, old, "--fix-legacy") == 2
    assert "--fix-legacy takes one file." in capsys.readouterr().err


def test_of_several_files_the_gravest_verdict_is_the_exit_code(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("max_length: 64\n", encoding="utf-8")
    assert check(good, "--no-fit") == 0
    capsys.readouterr()
    assert check(good, old, "--no-fit", "--json") == 2
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [each["outcome"] for each in verdicts] == ["reads", "cannot run"]


def test_a_file_that_cannot_be_read_is_one_sentence_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check("nope.yaml") == 2
    assert capsys.readouterr().out == "cannot run: nope.yaml does not exist. Name the YAML file\n  trainer sft\n"


def test_a_job_that_is_lost_takes_no_verdict_of_another_file_with_it(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(written: WrittenConfig, *more: Any) -> ReadCommand:
        if written.place == str(old):
            raise JobLostError("The job read_command was killed.", hint="Its log ends with: nothing")
        return read_command(written, *more)

    monkeypatch.setattr(of_check, "read_command", read)
    new = tmp_path / "new.yaml"
    new.write_text("output_dir: out\nbf16: false\nuse_cpu: true\n", encoding="utf-8")
    assert check(old, new, "--no-fit", "--json") == 3
    lost, other = json.loads(capsys.readouterr().out)["verdicts"]
    assert (lost["outcome"], lost["reason"]) == ("unknown", "The job read_command was killed.")
    assert other["outcome"] == "reads"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "H10"), "'H10' is not a known GPU"),
        (("--gpu", "H100-80GB", "--gpu", "T4"), "'H100-80GB,T4' is not a known GPU"),
        (("--gpu", "H100-80GB", "--probe"), "--probe runs on this machine's device, --gpu names a device to trace"),
        (("--gpu", "H100-80GB", "--memory-budget", "900GiB"), "larger than H100-SXM"),
        (("--memory-budget", "lots"), "lots"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_message_for_several_files(
    old: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(old, old, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count(message) == 1


def test_a_budget_larger_than_the_device_of_one_file_takes_no_verdict_of_another_with_it(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("output_dir: out\nuse_cpu: true\n", encoding="utf-8")
    assert check(small, old, "--memory-budget", "900TiB", "--json") == 2
    found, other = json.loads(capsys.readouterr().out)["verdicts"]
    assert found["outcome"] == other["outcome"] == "cannot run"
    assert "A memory budget of 921600 GiB is larger than" in found["reason"]
    assert "max_seq_length" in other["findings"][0]["message"]
