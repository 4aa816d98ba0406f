"""How a plan says what vLLM may take of the GPU."""

from __future__ import annotations

from dataclasses import replace
from html import unescape

import pytest

from autotune.core.candidate import Candidate
from autotune.core.vllm import VllmOutlook, VllmShare
from autotune.reporting.page import html, markdown
from autotune.reporting.page.plan_values import plan_values
from autotune.reporting.shares import COLUMNS
from autotune.units import GIB
from tests.reporting.plans import a_plan
from tests.reporting.test_page import HOSTILE, own
from tests.reporting.test_plan_drawn import drawn, words


def share(utilization: float, sequences: float, spare: float, sleeping: float) -> VllmShare:
    requested = round(80 * GIB * utilization)
    return VllmShare(utilization, requested, requested // 2, sequences, round(spare * GIB), round(sleeping * GIB))


LEAST, ENOUGH, MOST, SLEEPING = (
    share(0.22, 2.4, 20, 39), share(0.39, 66.0, 9, 39), share(0.5, 107.0, 0, 15), share(0.68, 175.0, -14, 0.4),
)  # fmt: skip
OUTLOOK = VllmOutlook(
    candidate=Candidate({"vllm": "colocate"}),
    fastest=True,
    training_bytes=40 * GIB,
    generation_bytes=25 * GIB,
    sequence_tokens=1536,
    completions=64,
    least=LEAST,
    most=MOST,
    most_sleeping=SLEEPING,
    enough=ENOUGH,
    shares=(LEAST, ENOUGH, MOST, SLEEPING),
    assumptions=("2.00 GiB go to its activations",),
)


def text(outlook: VllmOutlook | None, width: int = 100) -> str:
    return words(drawn(a_plan(vllm=outlook), width))


def test_the_question_is_answered_without_and_with_sleep_mode() -> None:
    said = text(OUTLOOK)
    assert (
        "Without sleep mode, vllm_gpu_memory_utilization from 0.22 to 0.50 leaves training enough; the KV cache then "
        "holds 107 sequences of 1,536 tokens."
    ) in said
    assert "With sleep mode, vllm_gpu_memory_utilization from 0.22 to 0.68 leaves training enough" in said
    assert "From 0.39 on, the cache holds all 64 completions of a generation batch at once." in said
    assert "Training needs 40.00 GiB by itself, and holds 25.00 GiB of them" in said
    assert "Assumed of vLLM: 2.00 GiB go to its activations" in said


def test_what_is_missing_is_said_where_nothing_leaves_training_enough() -> None:
    short = replace(LEAST, spare_bytes=-3 * GIB)
    said = text(replace(OUTLOOK, least=short, most=None))
    assert (
        "Without sleep mode, no vllm_gpu_memory_utilization leaves training enough: vLLM starts from 0.22 on, and "
        "3.00 GiB are missing then."
    ) in said
    nothing = replace(OUTLOOK, least=None, most=None, most_sleeping=None, enough=None, shares=())
    assert "vLLM does not start with any share of this GPU." in text(nothing)


def test_a_sequence_that_the_cache_holds_in_part_is_not_counted() -> None:
    part = replace(MOST, sequences=4.7)
    said = text(replace(OUTLOOK, most=part, shares=(part,)))
    assert "the KV cache then holds 4 sequences of 1,536 tokens." in said


def test_a_plan_without_vllm_says_nothing_of_it() -> None:
    assert "vLLM" not in text(None)


def test_a_cache_of_unknown_size_is_not_counted_in_sequences() -> None:
    unknown = replace(MOST, sequences=None)
    said = text(replace(OUTLOOK, most=unknown, shares=(unknown,)))
    assert "Without sleep mode, vllm_gpu_memory_utilization from 0.22 to 0.50 leaves training enough." in said


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_shares_fit_the_console(width: int) -> None:
    lines = drawn(a_plan(vllm=OUTLOOK), width).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    [row] = [line for line in lines if line.split()[:1] == ["0.68"]]
    assert row.split() == ["0.68", "54.40", "GiB", "27.20", "GiB", "175.0", "-14.00", "GiB", "410", "MiB"]


def test_the_page_of_a_plan_has_the_sentences_and_the_table_of_the_terminal() -> None:
    plan = a_plan(vllm=OUTLOOK)
    shown = plan_values(plan).vllm
    assert shown is not None
    said, page = words(drawn(plan, 200)), own(html(plan))
    for sentence in shown.answer:
        assert sentence in said
        assert sentence in unescape(page)
    last = shown.rows[-1]
    assert [cell.text for cell in last] == ["0.68", "54.40 GiB", "27.20 GiB", "175.0", "-14.00 GiB", "410 MiB"]
    assert [cell.short for cell in last] == [False, False, False, False, True, False]
    assert page.count('class="short">') == 1
    assert all(f"<th>{name}</th>" in page for name in COLUMNS)
    assert "<li>2.00 GiB go to its activations</li>" in page


def test_markdown_has_the_table_too() -> None:
    text = markdown(a_plan(vllm=OUTLOOK))
    assert "## vLLM on the same GPU" in text
    assert f"| {' | '.join(COLUMNS)} |" in text
    assert "| 0.68 | 54.40 GiB | 27.20 GiB | 175.0 | -14.00 GiB | 410 MiB |" in text
    assert "- 2.00 GiB go to its activations" in text


def test_a_page_of_a_plan_without_vllm_has_no_such_section() -> None:
    assert "vLLM" not in own(html(a_plan()))
    assert "vLLM" not in markdown(a_plan())


def test_a_hostile_choice_stays_text() -> None:
    hostile = replace(OUTLOOK, candidate=Candidate({"vllm": HOSTILE}), assumptions=(HOSTILE,))
    page = own(html(a_plan(vllm=hostile)))
    assert page.count("<script") == own(html(a_plan())).count("<script")
    assert "<img" not in page
