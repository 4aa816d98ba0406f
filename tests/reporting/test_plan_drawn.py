"""A plan fits any console, and every row is labelled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents.estimate import Plan
from autotune.inspection.gpus import gpus
from autotune.reporting.catalogues import gpus_report
from autotune.reporting.plan import plan_report
from autotune.units import GIB, MIB
from tests.reporting.as_text import as_text
from tests.reporting.plans import AN_EPOCH, DEFAULT, FASTEST, LONGEST, UNKNOWN, a_plan, an_estimate

WIDTHS = pytest.mark.parametrize("width", [60, 80, 120])


def drawn(plan: Plan, width: int, top: int = 20) -> str:
    """Return a plan as text."""
    return as_text(plan_report(plan, top), width)


def words(text: str) -> str:
    """Return text with its lines joined."""
    return " ".join(text.split())


def rows(text: str) -> list[str]:
    """Return the lines of the table of candidates that hold figures, with what follows each, joined."""
    table = text.split("differences from TRL's default", 1)[1].split(" candidates: ", 1)[0].rpartition("\n")[0]
    joined: list[str] = []
    for line in table.splitlines():
        if line[:4].strip():
            joined.append(words(line))
        elif joined:
            joined[-1] += f" {words(line)}"
    return [row.strip() for row in joined]


def test_a_terminal_has_the_batches_and_the_epoch_beside_the_defaults() -> None:
    text = words(drawn(a_plan(epoch=AN_EPOCH, baseline_epoch=AN_EPOCH, trainer="sft"), 100))
    assert "tokens covered 99.10 % 99.10 %" in text
    assert "documents per step 8 8" in text
    assert "fastest that fits TRL's default" in text


def test_a_price_is_shown_as_the_cost_on_all_gpus_beside_the_defaults() -> None:
    slow = replace(AN_EPOCH, seconds_per_epoch=150.0)
    priced = a_plan(epoch=AN_EPOCH, baseline_epoch=slow, trainer="sft", price=3.0, processes=8)
    # The default does not fit, so it cannot be bought.
    assert "cost per epoch 0.50 - " in words(drawn(priced, 100))
    priced = replace(priced, baseline=replace(DEFAULT, spare_bytes=0))
    assert "cost per epoch 0.50 1.00" in words(drawn(priced, 100))
    assert "cost" not in drawn(replace(priced, price=None), 100)
    # Of rows that are no dataset; 9,000 and 7,000 tokens per second.
    no_epoch = replace(AN_EPOCH, seconds_per_epoch=None)
    priced = replace(priced, epoch=no_epoch, baseline_epoch=no_epoch)
    assert "cost per 1e9 tokens 740.74 952.38" in words(drawn(priced, 100))


@WIDTHS
def test_a_plan_fits_the_console_and_cuts_nothing_off(width: int) -> None:
    text = drawn(a_plan(), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text


@WIDTHS
def test_each_row_shows_its_figures_and_what_differs_from_the_default(width: int) -> None:
    first, second, third, fourth = rows(drawn(a_plan(), width))
    assert first == (
        "1 20.00 GiB 4.00 GiB 3.00 MiB 9,000 gradient_checkpointing=selective lora=r16 packing=bfd "
        "per_device_train_batch_size=4"
    )
    assert second == "2 21.00 GiB 3.00 GiB 3.00 MiB 8,000 lora=r16 packing=bfd"
    assert third == (
        "3 31.00 GiB -7.00 GiB 3.00 MiB 7,000 TRL's default fits with lora=r16 packing=bfd, 3.00 GiB to spare"
    )
    assert fourth == "4 - - - - attention=strange_attention strange_attention gives no shape"


def test_the_default_is_shown_last_where_it_is_not_among_the_best() -> None:
    shown = rows(drawn(a_plan(), 80, top=1))
    assert len(shown) == 2
    assert shown[1].startswith("- 31.00 GiB")


def test_candidates_that_predict_the_same_share_a_row() -> None:
    same = replace(FASTEST, candidate=LONGEST.but(padding_free="on"))
    assert len(rows(drawn(a_plan(estimates=(FASTEST, same, UNKNOWN, DEFAULT)), 80))) == 3


def test_candidates_that_need_less_by_what_vllm_holds_have_a_row_each() -> None:
    assert FASTEST.memory is not None
    memories = [replace(FASTEST.memory, vllm_bytes=size) for size in (5 * GIB, 2 * GIB, GIB)]
    shares = tuple(
        replace(FASTEST, candidate=LONGEST.but(vllm_share=number), memory=memory)
        for number, memory in enumerate(memories)
    )
    assert len(rows(drawn(a_plan(estimates=shares), 80))) == 3 + 1


@WIDTHS
def test_bars_of_memory_are_in_proportion_and_have_their_figures(width: int) -> None:
    lines = drawn(a_plan(), width).split("memory at peak", 1)[1].splitlines()
    bars = {line.split()[0]: [part for part in line.split() if "█" in part] for line in lines if "█" in line}
    assert all(len(drawn) == 2 for drawn in (bars["sum"], bars["memory"], bars["parameter"]))
    assert len(bars["sum"][0]) == pytest.approx(20 / 31 * len(bars["sum"][1]), abs=1)
    assert len(bars["parameter"][0]) == pytest.approx(len(bars["sum"][0]) / 2, abs=1)
    text = words("\n".join(lines))
    assert "parameter 10.00 GiB" in text
    assert "context 512 MiB" in text


def test_parts_too_small_to_see_are_added_up_as_other() -> None:
    assert FASTEST.memory is not None
    breakdown = {**FASTEST.memory.breakdown, "buffer": MIB, "rounding": MIB}
    seen = replace(FASTEST, memory=replace(FASTEST.memory, breakdown=breakdown))
    text = drawn(a_plan(estimates=(seen,), baseline=seen), 80)
    assert "other" in text
    assert "buffer" not in text
    assert "2.00 MiB" in text


def test_bars_of_far_less_than_the_budget_are_drawn_against_one_another() -> None:
    small = an_estimate(LONGEST, 2 * GIB, 9000.0)
    lines = drawn(a_plan(estimates=(small,), baseline=small), 80).split("memory at peak", 1)[1].splitlines()
    needs = next(line for line in lines if line.startswith("sum"))
    assert needs.count("█") >= 16
    assert not any(line.startswith("memory budget") for line in lines)


def test_a_plan_without_estimates_says_so_and_draws_no_table_of_memory() -> None:
    text = drawn(a_plan(estimates=(UNKNOWN,), baseline=UNKNOWN, changes=()), 80)
    assert "autotune probe shows whether it trains" in text
    assert "strange_attention gives no shape" in words(text)
    assert "memory at peak" not in text


@WIDTHS
def test_the_catalogue_fits_the_console_and_says_what_is_not_sure(width: int) -> None:
    text = as_text(gpus_report(gpus(), width), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert all(gpu.name in text for gpu in gpus())
    assert "MI300X: memory is the driver's total" in words(text)
