"""Traces and plans of every architecture: the page is that of its data, and what holds of all rows."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from benchmarks.common import read_rows
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
