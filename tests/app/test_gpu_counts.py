"""The numbers of GPUs to plan for, the numbers shown in a table of several kinds, and similar offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from autotune.app.arguments import SearchArguments
from autotune.app.notes import close_calls
from autotune.app.options import checked_options
from autotune.app.rent import divisible_counts, nearest, offers_to_show, should_try_more_gpus
from autotune.core.candidate import Choice
from autotune.core.documents.rent import Offer
from autotune.core.gpu import Gpu
from autotune.errors import InputError
from autotune.inspection.gpus import find_gpu
from tests.reporting.rents import CHEAPEST, TOO_SMALL, UNPRICED, an_offer
from tests.settings import TWO, problem, setting

KNOWN = find_gpu("L40S")
UNTIMED = "fits, with no predicted speed"


def offers(*each: float | str | None, gpu: Gpu = KNOWN) -> list[Offer]:
    """Return the offers of 1, 2, 4, … GPUs with these tokens per second for each GPU; None if nothing fits."""
    counts = [2**power for power in range(len(each))]
    return [_offer(gpu, count, rate) for count, rate in zip(counts, each, strict=True)]


def _offer(gpu: Gpu, count: int, rate: float | str | None) -> Offer:
    if rate is None:
        return Offer(gpu, count, reason="the least needs more")
    return Offer(gpu, count, tokens_per_second=rate * count if isinstance(rate, float) else None)


@pytest.mark.parametrize(
    ("each", "goes_on"),
    [
        pytest.param((None, None), True, id="nothing fits"),
        pytest.param((None, 900.0), True, id="the first that fits"),
        pytest.param((None, 900.0, 3000.0), True, id="each trains more"),
        pytest.param((None, 900.0, 940.0), False, id="each trains hardly more"),
        pytest.param((None, 900.0, 3000.0, 2900.0), False, id="each trains less"),
        pytest.param((None, UNTIMED, UNTIMED), True, id="no speed yet"),
        pytest.param((None, UNTIMED, 900.0), True, id="the first speed"),
        pytest.param((None, UNTIMED, 900.0, 900.0), False, id="the second speed"),
    ],
)
def test_more_gpus_are_planned_for_until_each_trains_no_more(each: Sequence[float | str | None], goes_on: bool) -> None:
    assert should_try_more_gpus(offers(*each)) == goes_on


def test_the_best_of_several_gpus_is_tried_on_one_without_what_only_several_have() -> None:
    alone, together = problem(setting()), problem(setting(machine=TWO))
    found = together.baseline.but(sharding="fsdp2", per_device_train_batch_size=2, liger="unknown here")
    assert nearest(alone, found) == alone.normal(alone.baseline.but(per_device_train_batch_size=2))


def test_where_the_speed_of_a_gpu_is_not_known_the_first_number_that_fits_is_the_last() -> None:
    unknown = find_gpu("24GiB")
    assert unknown.speeds is None
    assert should_try_more_gpus(offers(None, gpu=unknown))
    assert not should_try_more_gpus(offers(None, UNTIMED, gpu=unknown))


def test_of_several_kinds_the_fewest_and_the_best_for_each_gpu_are_shown() -> None:
    def numbers(*each: float | str | None) -> list[int]:
        return [offer.processes for offer in offers_to_show(offers(*each), alone=False)]

    assert numbers(None, 900.0, 3000.0, 3100.0) == [2, 8]
    assert numbers(None, 900.0, 910.0) == [2]
    assert numbers(None, UNTIMED, 900.0, 930.0) == [2, 8]
    assert numbers(None, None) == [2]
    assert [offer.processes for offer in offers_to_show(offers(None, 900.0, 3000.0, 3100.0), alone=True)] == [
        1,
        2,
        4,
        8,
    ]


@pytest.mark.parametrize(
    ("batch", "fix", "machines", "numbers"),
    [
        pytest.param(8, {}, None, [1, 2, 4, 8], id="each GPU has a document"),
        pytest.param(12, {}, None, [1, 2, 4], id="what divides the documents"),
        pytest.param(64, {}, 2, [2, 4, 8, 16, 32, 64], id="two machines have as many each"),
        pytest.param(64, {}, 16, [16, 32, 64], id="sixteen machines"),
        pytest.param(8, {"context_parallel": 2}, None, [2, 4, 8, 16], id="two GPUs share a row"),
    ],
)
def test_numbers_are_tried_among_which_the_global_batch_can_be_shared_out(
    batch: int, fix: Mapping[str, Choice], machines: int | None, numbers: Sequence[int]
) -> None:
    assert divisible_counts(batch, checked_options(SearchArguments(trainer="sft", fix=fix)), machines) == numbers


@pytest.mark.parametrize("machines", [3, 0, -1])
def test_a_number_of_machines_that_no_number_of_gpus_is_shared_out_among_is_refused(machines: int) -> None:
    with pytest.raises(InputError, match="cannot be divided among any number of GPUs tried"):
        divisible_counts(64, checked_options(SearchArguments(trainer="sft")), machines)


def test_what_predicted_times_do_not_tell_from_the_best_is_noted() -> None:
    near, far = an_offer("A100-80GB", 22_000.0, 2.1), an_offer("H100-80GB", 100_000.0, 10.1)
    cheap, fast = (
        f"May be as {best}, since predicted times may be off by up to 25 %: {{}}."
        for best in ("cheap as the cheapest", "fast as the fastest")
    )
    assert [*close_calls((CHEAPEST, near, far, UNPRICED, TOO_SMALL))] == [cheap.format("A100-80GB")]
    assert [*close_calls((CHEAPEST, far, an_offer("H200", 81_000.0, None)))] == [fast.format("H200")]
    assert [*close_calls((TOO_SMALL,))] == []


def test_offers_whose_times_the_host_bounds_are_told_apart_only_where_they_differ_by_more() -> None:
    far = an_offer("A100-80GB", 22_000.0, 2.4)
    assert [*close_calls((CHEAPEST, far))] == []
    assert far.estimate is not None
    assert far.estimate.memory is not None
    doubtful = replace(far, estimate=replace(far.estimate, memory=replace(far.estimate.memory, time_error=0.5)))
    assert [*close_calls((CHEAPEST, doubtful))] == [
        "May be as cheap as the cheapest, since predicted times may be off by up to 50 %: A100-80GB."
    ]
