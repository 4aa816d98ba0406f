"""The cached result of an operator equals that of a call with the same argument metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.virtual.operators import memo

aten = torch.ops.aten


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def ran(func: Any, args: Any, kwargs: Any, fake: FakeTensorMode) -> Any:
    return memo.run(func, args, kwargs, fake)[0]


def test_results_are_like_one_another_and_each_has_its_own_storage(fake: FakeTensorMode) -> None:
    first, second = (
        ran(aten.mm.default, (torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(5, 7, dtype=torch.bfloat16)),
                 {}, fake)
        for _ in range(2)
    )  # fmt: skip

    for result in (first, second):
        assert (result.shape, result.stride(), result.dtype) == ((3, 7), (7, 1), torch.bfloat16)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 3 * 7 * 2


def test_a_result_has_all_that_pytorch_gives_a_fake_tensor(fake: FakeTensorMode) -> None:
    first, *others = (ran(aten.neg.default, (torch.empty(3, 5),), {}, fake) for _ in range(3))

    for result in others:
        assert result.__dict__ == first.__dict__
        assert (result.device, result.requires_grad) == (first.device, first.requires_grad)
        # Activation offloading asks for the address of a storage, which no fake tensor has.
        assert result.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() == 0


def test_several_results_come_in_their_order(fake: FakeTensorMode) -> None:
    for _ in range(2):
        values, places = ran(aten.topk.default, (torch.empty(4, 9), 2), {}, fake)
        assert (values.dtype, places.dtype, places.shape) == (torch.float32, torch.int64, (4, 2))


def test_what_a_kernel_in_an_operator_s_place_returns_beside_tensors_is_returned_again(fake: FakeTensorMode) -> None:
    calls = []

    def kernel(tensor: torch.Tensor) -> tuple[Any, ...]:
        calls.append(tensor)
        return tensor.new_empty(3), None, tensor.size(0), tensor.new_empty(())

    results = [memo.run(aten.erf.default, (torch.empty(size, 2),), {}, fake, kernel)[0] for size in (9, 9, 8)]
    assert len(calls) == 2
    assert [(values.shape, nothing, rows) for values, nothing, rows, _ in results] == [
        ((3,), None, 9), ((3,), None, 9), ((3,), None, 8)
    ]  # fmt: skip
    assert len({result[place].untyped_storage()._cdata for result in results for place in (0, 3)}) == 6


def test_what_changes_its_first_argument_returns_that(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4)
        assert ran(aten.add_.Tensor, (tensor, torch.empty(4)), {}, fake) is tensor


def test_what_writes_to_a_named_argument_returns_that(fake: FakeTensorMode) -> None:
    for _ in range(2):
        out = torch.empty(3, 7)
        assert ran(aten.mm.out, (torch.empty(3, 5), torch.empty(5, 7)), {"out": out}, fake) is out


def test_what_gives_a_named_argument_its_size_does_so_each_time(fake: FakeTensorMode) -> None:
    for _ in range(2):
        out = torch.empty(0)
        ran(aten.mm.out, (torch.empty(3, 5), torch.empty(5, 7)), {"out": out}, fake)
        assert out.shape == (3, 7)


def test_what_changes_a_list_of_tensors_returns_nothing(fake: FakeTensorMode) -> None:
    for _ in range(2):
        assert ran(aten._foreach_add_.Scalar, ([torch.empty(4), torch.empty(2)], 1), {}, fake) is None


def test_a_view_that_its_operator_does_not_declare_shares_the_storage(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4, 6)
        view = ran(aten._unsafe_view.default, (tensor, [24]), {}, fake)
        assert (view.shape, view.untyped_storage()._cdata) == ((24,), tensor.untyped_storage()._cdata)


def test_notes_are_kept_for_arguments_of_the_same_metadata(fake: FakeTensorMode) -> None:
    def notes(*shape: int) -> Any:
        return memo.run(aten.neg.default, (torch.empty(*shape),), {}, fake)[1]

    notes(4, 6)["work"] = 24

    assert notes(4, 6) == {"work": 24}
    assert notes(6, 4) == {}


def test_a_view_stays_a_view(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4, 6)
        view = ran(aten.t.default, (tensor,), {}, fake)
        assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert (view.shape, view.stride()) == ((6, 4), (1, 6))


def test_a_view_keeps_its_type_while_zero_3_builds_a_model(
    fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.empty
    # As ``zero.Init`` of DeepSpeed does, whose cast the frequencies of rotary embeddings do not get.
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: made(*size, **kwargs).to(torch.bfloat16))

    for _ in range(2):
        assert ran(aten.detach.default, (made(3, 5),), {}, fake).dtype == torch.float32


def test_of_several_views_each_begins_where_it_should(fake: FakeTensorMode) -> None:
    for _ in range(2):
        whole = torch.empty(9, 4)
        views = ran(aten.split.Tensor, (whole[1:], 4), {}, fake)
        assert [view.storage_offset() for view in views] == [4, 20]
        assert {view.untyped_storage()._cdata for view in views} == {whole.untyped_storage()._cdata}


def test_a_view_of_a_later_part_is_not_taken_for_one_of_an_earlier(fake: FakeTensorMode) -> None:
    whole = torch.empty(9, 4)
    places = [ran(aten.t.default, (whole[first : first + 2],), {}, fake).storage_offset() for first in (1, 3, 1)]
    assert places == [4, 12, 4]


def test_integers_seen_as_other_integers_keep_their_storage(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4, dtype=torch.int32)
        view = ran(aten.view.dtype, (tensor, torch.uint8), {}, fake)
        assert (view.shape, view.untyped_storage()._cdata) == ((16,), tensor.untyped_storage()._cdata)


def test_what_has_a_storage_resized_has_it_resized_each_time(fake: FakeTensorMode) -> None:
    for _ in range(2):
        tensor = torch.empty(4)
        ran(aten.resize_.default, (tensor, [9]), {}, fake)
        assert tensor.shape == (9,)


@pytest.mark.parametrize(("scalar", "dtype"), [(2, torch.int64), (2.0, torch.float32)])
def test_equal_numbers_of_different_types_are_not_taken_for_one_another(
    fake: FakeTensorMode, scalar: float, dtype: torch.dtype
) -> None:
    assert ran(aten.mul.Tensor, (torch.empty(4, dtype=torch.int64), scalar), {}, fake).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_default_type_is_looked_at(fake: FakeTensorMode, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = ran(aten.mul.Tensor, (torch.empty(4, dtype=torch.int64), 0.5), {}, fake).dtype
    finally:
        torch.set_default_dtype(before)
    assert found == dtype


def test_strides_and_devices_are_told_apart(fake: FakeTensorMode) -> None:
    across, meta = torch.empty(4, 6).t(), torch.empty(6, 4, device="meta")
    assert ran(aten.clone.default, (torch.empty(6, 4),), {}, fake).stride() == (4, 1)
    assert ran(aten.clone.default, (across,), {}, fake).stride() == (1, 6)
    assert ran(aten.clone.default, (meta,), {}, fake).device.type == "meta"
