"""The table of GPUs in a terminal: sentences, figures, and GPUs that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents.rent import Offer, Rent
from autotune.inspection.gpus import find_gpu
from autotune.reporting.document import Table
from autotune.reporting.rent import best_text, rent_report, unfit_lines
from autotune.reporting.words import bytes_or_dash
from autotune.units import GIB
from tests.reporting.as_text import as_text
from tests.reporting.rents import CHEAPEST, FASTEST, TOO_SMALL, UNPRICED, a_rent


def drawn(width: int, **changes: object) -> str:
    return as_text(rent_report(a_rent(**changes)), width)


def table(found: Rent) -> Table:
    """Return the table of what fits."""
    [drawn] = rent_report(found).blocks(Table)
    return drawn


def cells(offer: Offer, found: Rent) -> list[str]:
    """Return the figures of an offer in the table."""
    return [str(cell) for cell in table(replace(found, offers=(offer,))).rows[0]]


def test_the_cheapest_and_the_fastest_are_each_a_sentence() -> None:
    assert best_text(a_rent()) == (
        "The cheapest: L40S, 10,000 tok/s, 100 h 00 min per epoch for 80.00."
        " The fastest: 4 x H200, 120,000 tok/s, 8 h 20 min per epoch for 133.33."
    )


def test_a_speed_that_depends_on_an_assumption_about_the_host_is_marked_wherever_it_stands() -> None:
    estimate = CHEAPEST.estimate
    assert estimate is not None
    assert estimate.memory is not None
    doubtful = replace(CHEAPEST, estimate=replace(estimate, memory=replace(estimate.memory, time_error=0.5)))
    assert best_text(a_rent(offers=(doubtful,))) == (
        "The cheapest and the fastest: L40S, ~10,000 tok/s, ~100 h 00 min per epoch for ~80.00."
    )
    assert cells(doubtful, a_rent())[-3:] == ["~10,000", "~100 h 00 min", "~80.00"]


def test_a_rate_per_gpu_stands_beside_that_of_all_only_where_several_train_together() -> None:
    assert "per GPU" in table(a_rent()).columns
    assert "needs of each" in table(a_rent()).columns
    alone = table(a_rent(offers=(CHEAPEST, UNPRICED))).columns
    assert "per GPU" not in alone
    assert alone[1] == "needs"


def test_the_name_of_a_gpu_is_whole_in_a_terminal_of_80_columns() -> None:
    named = replace(CHEAPEST, gpu=replace(CHEAPEST.gpu, name="A100-PCIe-80GB"))
    assert "A100-PCIe-80GB " in drawn(80, offers=(named, UNPRICED))


def test_figures_are_wrapped_between_words() -> None:
    assert any(line.startswith("4 x H200 ") and "120,000" in line for line in drawn(62).splitlines())


def test_titles_are_wrapped_before_figures() -> None:
    offers = tuple(replace(each, seconds=73.0, cost=1.25) for each in (CHEAPEST, UNPRICED))
    lines = drawn(72, offers=offers).splitlines()
    titles = next(place for place, line in enumerate(lines) if line.startswith("GPUs "))
    assert " ".join(lines[titles - 1 : titles + 1]).split().count("epoch") == 2
    figures = [line.split()[-5:] for line in lines[titles:] if line.startswith(("L40S ", "B200 "))]
    assert figures == [["1", "min", "13", "s", "1.25"]] * 2


def test_one_gpu_that_is_both_is_named_once() -> None:
    assert best_text(a_rent(offers=(CHEAPEST, TOO_SMALL))).startswith("The cheapest and the fastest: L40S, ")


def test_what_has_less_to_spare_than_the_estimate_may_be_off_by_is_not_named_without_that() -> None:
    assert CHEAPEST.estimate is not None
    tight = replace(CHEAPEST, estimate=replace(CHEAPEST.estimate, spare_bytes=2 * GIB - 1))
    exact = replace(CHEAPEST, estimate=replace(CHEAPEST.estimate, spare_bytes=2 * GIB))
    assert best_text(a_rent(offers=(tight,))).endswith(" for 80.00, which may not fit.")
    assert best_text(a_rent(offers=(exact,))).endswith(" for 80.00.")
    assert bytes_or_dash(2 * GIB) in cells(exact, a_rent())


def test_without_prices_there_is_no_cost() -> None:
    free = a_rent(priced=False, offers=(replace(FASTEST, cost=None, price=None), TOO_SMALL))
    assert best_text(free) == "The fastest: 4 x H200, 120,000 tok/s, 8 h 20 min per epoch."
    assert not any("cost" in title for title in table(free).columns)


@pytest.mark.parametrize(
    ("cost", "shown"), [(0.001234, "0.0012"), (0.5, "0.50"), (0.999, "1.00"), (1e-5, "0.000010"), (0.0, "0.00")]
)
def test_a_cost_below_one_keeps_its_digits(cost: float, shown: str) -> None:
    assert cells(replace(CHEAPEST, cost=cost), a_rent())[-1] == shown


def test_a_gpu_without_a_price_has_a_dash() -> None:
    assert cells(UNPRICED, a_rent())[-1] == "-"


def test_where_nothing_fits_that_is_said_with_each_reason() -> None:
    nothing = a_rent(offers=(TOO_SMALL,))
    assert best_text(nothing) == "Nothing is predicted to fit on any of these GPUs."
    assert unfit_lines(nothing) == ("T4: the least needs 20.00 GiB of 14.56 GiB",)


def test_gpus_with_the_same_reason_share_its_line() -> None:
    old = replace(TOO_SMALL, reason="the GPU has no bf16 arithmetic")
    older = replace(old, gpu=find_gpu("V100-16GB"))
    assert unfit_lines(a_rent(offers=(old, TOO_SMALL, older))) == (
        "T4, V100-16GB: the GPU has no bf16 arithmetic",
        "T4: the least needs 20.00 GiB of 14.56 GiB",
    )


def test_speeds_that_are_not_known_are_said() -> None:
    unknown = replace(CHEAPEST, tokens_per_second=None, seconds=None, cost=None)
    assert best_text(a_rent(offers=(unknown,))) == "1 of these fits, and no speed is known."


def test_gpus_with_the_same_configuration_share_its_line() -> None:
    text = drawn(100)
    assert text.count("packing=bfd lora=r16") == 1
    assert "L40S, 4 x H200, B200" in text


@pytest.mark.parametrize("width", [60, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_every_figure_is_there(width: int) -> None:
    text = drawn(width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "12 traces (10 new) in 33 s." in flat
    if width >= 100:
        assert all(str(cell) in text for row in table(a_rent()).rows for cell in row)
