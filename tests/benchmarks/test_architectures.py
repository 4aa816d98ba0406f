"""Traces and plans of every architecture: the page matches its data, and all rows meet the limits."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.common import read_rows
from benchmarks.plan import architectures as module
from benchmarks.plan.architectures import FOLDER, architectures, errors_of, page, sentence

ROWS = read_rows(FOLDER / "architectures.jsonl")
COMPARED = [errors_of(row) for row in ROWS]


def test_the_page_is_that_of_the_data() -> None:
    assert FOLDER.joinpath("architectures.md").read_text(encoding="utf-8") == page(ROWS)


def test_no_architecture_is_left_out() -> None:
    recorded = re.search(r"transformers ([\d.]+)", FOLDER.joinpath("architectures.md").read_text(encoding="utf-8"))
    assert recorded is not None
    if version("transformers") != recorded[1]:
        pytest.skip(f"they were recorded with transformers {recorded[1]}, which has others")
    missing = set(architectures()) - {row["architecture"] for row in ROWS}
    assert not missing, f"python -m benchmarks.plan.architectures --only {','.join(sorted(missing))}"


def test_a_trace_has_what_the_cpu_allocates_for_every_architecture_that_trains() -> None:
    untraced = [row["architecture"] for row in ROWS if "untrained" not in row["run"] and "real" not in row["run"]]
    # Splits tokens by lists of how many each expert has, of which a trace knows nothing.
    assert untraced == ["jetmoe"]
    assert max(abs(errors["run"]) for errors in COMPARED if "run" in errors) <= 0.01


def test_the_documentation_quotes_the_result() -> None:
    page = " ".join((FOLDER.parents[1] / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    assert sentence(ROWS) in page


@pytest.fixture
def with_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the benchmark have rows of two architectures, and find the same of each that it compares."""
    kept = tmp_path / "architectures.jsonl"
    old = {"run": {"real": 100, "traced": 50}, "planned": {"allocated": [50, 100]}}
    kept.write_text("".join(f"{json.dumps({'architecture': name, **old})}\n" for name in ("mamba", "llama")))
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "_preload", lambda: None)
    monkeypatch.setattr(module, "_run_apart", lambda _: {"real": 100, "traced": 100})
    monkeypatch.setattr(module, "_planned", lambda *_: {"allocated": [100, 100]})
    return kept


def test_a_named_architecture_that_has_a_row_is_compared_anew(
    with_two_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["architectures", "--only", "mamba,gemma"])
    module.main()
    assert [(row["architecture"], row["run"]["traced"]) for row in read_rows(with_two_rows)] == [
        ("mamba", 100),
        ("llama", 50),
        ("gemma", 100),
    ]
    written = with_two_rows.with_suffix(".md").read_text(encoding="utf-8")
    assert "| mamba | +0.000% | +0.000% |" in written


def test_a_name_that_is_no_architecture_is_an_error_and_gets_no_row(
    with_two_rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["architectures", "--only", "llama,lama"])
    with pytest.raises(SystemExit):
        module.main()
    assert "no architecture lama " in capsys.readouterr().err
    assert [row["run"]["traced"] for row in read_rows(with_two_rows)] == [50, 50]
