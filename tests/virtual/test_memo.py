"""What an operator returns when it is run again on the like of what it was given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.virtual import memo

aten = torch.ops.aten


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def test_results_are_like_one_another_and_each_has_its_own_storage(fake: FakeTensorMode) -> None:
    first, second = (
        memo.run(aten.mm.default, (torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(5, 7, dtype=torch.bfloat16)),
                 {}, fake)
        for _ in range(2)
    )  # fmt: skip

    for result in (first, second):
        assert (result.shape, result.stride(), result.dtype) == ((3, 7), (7, 1), torch.bfloat16)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 3 * 7 * 2


def test_several_results_come_in_their_order(fake: FakeTensorMode) -> None:
    for _ in range(2):
        values, places = memo.run(aten.topk.default, (torch.empty(4, 9), 2), {}, fake)
        assert (values.dtype, places.dtype, places.shape) == (torch.float32, torch.int64, (4, 2))


def test_what_changes_its_first_argument_returns_that(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4)
        assert memo.run(aten.add_.Tensor, (tensor, torch.empty(4)), {}, fake) is tensor


def test_a_view_stays_a_view(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4, 6)
        view = memo.run(aten.t.default, (tensor,), {}, fake)
        assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert (view.shape, view.stride()) == ((6, 4), (1, 6))


def test_of_several_views_each_begins_where_it_should(fake: FakeTensorMode) -> None:
    for _ in range(2):
        whole = torch.empty(9, 4)
        views = memo.run(aten.split.Tensor, (whole[1:], 4), {}, fake)
        assert [view.storage_offset() for view in views] == [4, 20]
        assert {view.untyped_storage()._cdata for view in views} == {whole.untyped_storage()._cdata}


def test_a_view_of_a_later_part_is_not_taken_for_one_of_an_earlier(fake: FakeTensorMode) -> None:
    whole = torch.empty(9, 4)
    places = [memo.run(aten.t.default, (whole[first : first + 2],), {}, fake).storage_offset() for first in (1, 3, 1)]
    assert places == [4, 12, 4]


def test_integers_seen_as_other_integers_keep_their_storage(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4, dtype=torch.int32)
        view = memo.run(aten.view.dtype, (tensor, torch.uint8), {}, fake)
        assert (view.shape, view.untyped_storage()._cdata) == ((16,), tensor.untyped_storage()._cdata)


def test_what_has_a_storage_resized_has_it_resized_each_time(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4)
        memo.run(aten.resize_.default, (tensor, [9]), {}, fake)
        assert tensor.shape == (9,)


@pytest.mark.parametrize(("scalar", "dtype"), [(2, torch.int64), (2.0, torch.float32)])
def test_equal_numbers_of_different_types_are_not_taken_for_one_another(
    fake: FakeTensorMode, scalar: float, dtype: torch.dtype
) -> None:
    assert memo.run(aten.mul.Tensor, (torch.empty(4, dtype=torch.int64), scalar), {}, fake).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_default_type_is_looked_at(fake: FakeTensorMode, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = memo.run(aten.mul.Tensor, (torch.empty(4, dtype=torch.int64), 0.5), {}, fake).dtype
    finally:
        torch.set_default_dtype(before)
    assert found == dtype


def test_strides_and_devices_are_told_apart(fake: FakeTensorMode) -> None:
    across, meta = torch.empty(4, 6).t(), torch.empty(6, 4, device="meta")
    assert memo.run(aten.clone.default, (torch.empty(6, 4),), {}, fake).stride() == (4, 1)
    assert memo.run(aten.clone.default, (across,), {}, fake).stride() == (1, 6)
    assert memo.run(aten.clone.default, (meta,), {}, fake).device.type == "meta"
