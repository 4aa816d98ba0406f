"""A run from the user's configuration is compared with it, and shows the cost of its settings."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

from autotune.core.candidate import Candidate
from autotune.core.documents.result import BaseFile, Contribution, Result
from autotune.core.events import WorkloadReady
from autotune.core.status import ProbeStatus
from autotune.reporting.comparison import costs, headline, runs_text
from autotune.reporting.document import Code, Diff
from autotune.reporting.probe import probe_report
from autotune.reporting.progress import Progress
from tests.reporting.examples import a_result, a_workload, nothing_fits
from tests.reporting.pages import html, markdown
from tests.reporting.test_page import HOSTILE
from tests.reporting.test_page import own as own_part

DIFF = (
    "--- mine.yaml\n+++ mine.yaml\n@@ -1 +1 @@\n"
    "-gradient_checkpointing: true  # old\n+gradient_checkpointing: false  # old\n"
)


def contribution(knob: str, speedup: float | None, *, significant: bool | None = True) -> Contribution:
    """Return what changing one choice back came to."""
    return Contribution(knob, "new", "old", 3, ProbeStatus.OK, "", speedup, 0, significant)


def own() -> Result:
    """Return a result with a base of which five keys change."""
    keys: dict[str, dict[str, object]] = {
        "gradient_checkpointing": {"gradient_checkpointing": True},
        "per_device_train_batch_size": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
        "precision": {"dtype": "float32"},
        "optimizer": {"optim": "adamw_torch"},
        "liger": {"use_liger_kernel": False},
    }
    contributions = (
        contribution("precision", 1.2),
        contribution("gradient_checkpointing", 1.34),
        contribution("per_device_train_batch_size", 1.07),
        contribution("optimizer", 1.9, significant=False),
        contribution("liger", 1.03),
        contribution("attention", 3.0),
    )
    return replace(a_result(), base=BaseFile("mine.yaml", keys, diff=DIFF), contributions=contributions)


def test_what_costs_most_comes_first_and_what_is_not_told_apart_or_not_in_the_file_is_left_out() -> None:
    assert costs(own()) == (
        (Code("gradient_checkpointing: true"), "costs 34 %"),
        (Code("dtype: float32"), "costs 20 %"),
        (Code("gradient_accumulation_steps: 4, per_device_train_batch_size: 2"), "costs 7 %"),
    )
    assert costs(a_result()) == ()


def test_the_comparison_is_with_the_user_s_configuration() -> None:
    result = own()
    assert result.recommended is not None
    assert "the speed of your configuration" in headline(result, result.recommended)
    assert "alternating with your configuration" in runs_text(result, result.recommended)
    slow = replace(result, recommended=result.baseline)
    assert result.baseline is not None
    assert headline(slow, result.baseline).startswith("Your configuration is already the fastest")


def test_progress_names_it() -> None:
    progress = Progress()
    progress.follow(WorkloadReady(a_workload(), a_result().hardware, 1, 1, own=True))
    assert progress.candidate_text(Candidate({}), "baseline") == "your configuration"


def test_the_page_names_it_too() -> None:
    text = markdown(own())
    assert "Compared with your configuration" in text
    assert "TRL's default" not in text


def test_a_page_marks_the_lines_of_the_difference() -> None:
    page = unescape(html(own()))
    assert "<code>gradient_checkpointing: true</code> costs 34 %" in page
    assert '<span class="removed">-gradient_checkpointing: true  # old</span>' in page
    assert '<span class="added">+gradient_checkpointing: false  # old</span>' in page


def test_markdown_has_the_difference_in_a_block_of_its_own() -> None:
    text = markdown(own())
    assert "- `gradient_checkpointing: true` costs 34 %" in text
    assert f"```diff\n{DIFF}```" in text


def test_a_search_without_a_file_or_without_a_recommendation_shows_no_change_of_one() -> None:
    for result in (a_result(), replace(nothing_fits(), base=BaseFile("mine.yaml"))):
        assert probe_report(result).blocks(Diff) == []


def test_a_hostile_file_stays_text() -> None:
    keys = {"gradient_checkpointing": {"run_name": HOSTILE}}
    diff = f"--- {HOSTILE}\n+++ {HOSTILE}\n@@ -1 +1 @@\n-a: {HOSTILE}\x1b[2J\n+a: ````\n"
    result = replace(own(), base=BaseFile(HOSTILE, keys, diff=diff))
    page, plain = html(result), html(own())
    assert page.count("<script") == plain.count("<script")
    assert "<img" not in own_part(page)
    assert "\x1b" not in page
    text = markdown(result)
    assert "\n`````diff\n" in text
    assert f"\n-a: {HOSTILE}\\x1b[2J\n" in text


def test_a_difference_of_a_file_from_windows_can_be_copied_and_names_its_line_ends_once() -> None:
    base = BaseFile("mine.yaml", diff="--- mine.yaml\n+++ mine.yaml\n-a:\t1\r\n+a:\t2\r\n")
    result = replace(own(), base=base)
    assert "line ends: CRLF\n--- mine.yaml\n+++ mine.yaml\n-a:\t1\n+a:\t2\n" in markdown(result)
    assert "+a:\t2</span>" in unescape(html(result))
    assert "CRLF" not in markdown(own())
