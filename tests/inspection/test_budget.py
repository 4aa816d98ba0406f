"""The memory that a candidate may need, from the user's budget and the device's free memory."""

from __future__ import annotations

import pytest

from autotune.core.machine import Hardware
from autotune.errors import InputError
from autotune.inspection.machine import memory_budget
from autotune.units import GIB

CARD = Hardware(kind="cuda", name="Test GPU", memory_bytes=24 * GIB, used_by_others_bytes=4 * GIB)


def test_by_default_it_is_what_others_leave() -> None:
    assert memory_budget(None, CARD) == 20 * GIB


@pytest.mark.parametrize("asked", ["16GiB", 16 * GIB])
def test_a_size_and_a_number_of_bytes_mean_the_same(asked: str | int) -> None:
    assert memory_budget(asked, CARD) == 16 * GIB


def test_all_of_the_device_may_be_asked_for() -> None:
    assert memory_budget("24GiB", CARD) == 24 * GIB


def test_more_than_the_device_is_refused_and_both_sizes_are_told() -> None:
    with pytest.raises(InputError, match=r"80\.00 GiB is larger than Test GPU, which has 24\.00 GiB"):
        memory_budget("80GiB", CARD)


@pytest.mark.parametrize("asked", ["lots", "", "24", 0, -1, 10**400, pytest.param(-(10**5000), id="of 5000 digits")])
def test_what_is_no_size_is_refused(asked: str | int) -> None:
    with pytest.raises(InputError):
        memory_budget(asked, CARD)


def test_a_device_that_others_fill_has_no_default_budget() -> None:
    full = Hardware(kind="cuda", name="Test GPU", memory_bytes=GIB, used_by_others_bytes=GIB)
    with pytest.raises(InputError, match=r"Others use all 1\.00 GiB of Test GPU"):
        memory_budget(None, full)
