"""A drawn report fits the console and has every computed value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents.catalogue import CatalogueOption, CatalogueRow
from autotune.core.documents.length_report import length_report
from autotune.core.documents.result import Contribution, Result
from autotune.core.status import ProbeStatus
from autotune.reporting.catalogues import techniques_report
from autotune.reporting.lengths import lengths_report
from autotune.reporting.probe import probe_report
from tests.reporting.as_text import as_text
from tests.reporting.examples import a_result, a_workload, interrupted, nothing_fits

WIDTHS = pytest.mark.parametrize("width", [80, 120])
ROW = CatalogueRow(
    knob="packing",
    summary="Fills rows.",
    needs="a | mask",
    changes="cuts documents",
    writes=("args.packing",),
    in_default_space=False,
    default="none",
    options=(
        CatalogueOption("none", "one document per row", "exact", True),
        CatalogueOption("wrapped", "end to end", "changes-training", False, "no GPU"),
    ),
)


def drawn(result: Result, width: int) -> str:
    """Return the summary as text."""
    return as_text(probe_report(result), width)


def widest(text: str) -> int:
    """Return the length of the longest line."""
    return max(len(line.rstrip()) for line in text.splitlines())


@WIDTHS
@pytest.mark.parametrize("result", [a_result(), nothing_fits(), interrupted()], ids=lambda result: str(result.status))
def test_a_summary_fits_the_console(result: Result, width: int) -> None:
    text, _, _ = drawn(result, width).partition("The bundle is in ")
    assert widest(text) <= width


@pytest.mark.parametrize("width", [54, 60, 80])
def test_a_choice_is_not_broken_where_texts_beside_it_can_be(width: int) -> None:
    reason = "the limit of probes or of time was reached"
    unmeasured = Contribution("gradient_checkpointing", "off", "on", None, ProbeStatus.VETOED, reason, None, None)
    lines = drawn(replace(a_result(), contributions=(unmeasured,)), width).splitlines()
    assert any(line.split()[:2] == ["gradient_checkpointing=off", "on"] for line in lines)
    # Nor is a title, where there is room for it.
    assert width < 80 or any("TRL's default   effect of reverting it" in line for line in lines)


@pytest.mark.parametrize("width", [20, 80])
def test_a_command_to_copy_is_one_line_whatever_the_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = "/runs/" + "a-long-name/" * 12
    lines = drawn(a_result(output_directory=folder), width).splitlines()
    assert lines[-1] == f"Train with:  CUDA_VISIBLE_DEVICES=0 trl sft --config {folder}config.yaml"
    assert lines[-2] == f"The bundle is in {folder.rstrip('/')}"


def test_markup_in_names_is_shown_as_it_is() -> None:
    assert "[bold]" in drawn(a_result(notes=("see [bold]",)), 80)


@WIDTHS
def test_lengths_fit_the_console_and_show_every_limit(width: int) -> None:
    report = length_report(a_workload())
    text = as_text(lengths_report(report), width)
    assert widest(text) <= width
    assert all(f"{limit.max_length:,}" in text for limit in report.limits)
    assert "…" not in text


@WIDTHS
def test_techniques_tell_what_is_missing_here_and_what_changes_training(width: int) -> None:
    text = " ".join(as_text(techniques_report([ROW]), width).split())
    assert "wrapped end to end (changes training) (unavailable: no GPU)" in text
    assert "--allow packing: cuts documents" in text
    assert "not in the default search space" in text
