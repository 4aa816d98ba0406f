"""``autotune report`` on the command line: its output and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cli.boundary import run
from autotune.emit.document import json_text
from tests.reporting.examples import a_result


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "result.json").write_text(json_text(a_result()), encoding="utf-8")
    return tmp_path


def test_it_says_what_it_wrote(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autotune", "report", str(bundle)]) == 0
    assert capsys.readouterr().out == f"wrote {bundle / 'report.html'}\n"
    assert (bundle / "report.html").exists()


def test_a_page_for_a_pull_request_is_markdown(bundle: Path) -> None:
    assert run(["autotune", "report", str(bundle), "--format", "markdown", "--output", str(bundle / "page.md")]) == 0
    assert (bundle / "page.md").read_text(encoding="utf-8").startswith("# 2.3")


def test_where_there_is_no_result_it_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autotune", "report", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "There is no result: " in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "command", [["report", "."], ["plan", "M", "D", "--html", "."], ["check", "--fix-legacy", "a.yaml"]]
)
def test_a_directory_in_the_place_of_a_file_to_write_is_refused_before_any_work(
    command: list[str], bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle)
    words = command if "--html" in command else [*command, "--output", "."]
    option = words[-2]
    assert run(["autotune", *words]) == 2
    assert capsys.readouterr().err == f"autotune: . is a directory. Give the name of a file with {option}.\n"
