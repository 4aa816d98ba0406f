"""Which values are computed beside a trace, and which would not be kept and so are not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.virtual.known import Knowledge, set_known

_NOT_BEFORE = torch.ops.aten.ge.Tensor
_HALVED = torch.ops.aten.div.Tensor


@pytest.mark.parametrize(("tokens", "is_computed"), [(64, True), (4096, True), (4097, False)])
def test_a_mask_over_too_many_tokens_is_not_computed(tokens: int, is_computed: bool) -> None:
    queries, keys = torch.arange(tokens).view(-1, 1), torch.arange(tokens).view(1, -1)
    with FakeTensorMode():
        inputs = [torch.empty(values.shape, dtype=values.dtype) for values in (queries, keys)]
        mask = _NOT_BEFORE(*inputs)
    for tensor, values in zip(inputs, (queries, keys), strict=True):
        set_known(tensor, values)

    found = Knowledge().compute(_NOT_BEFORE, tuple(inputs), {}, inputs, mask)

    assert (found is not None) is is_computed
    assert found is None or torch.equal(found, queries >= keys)


def test_floating_point_results_are_computed_where_they_are_a_single_number() -> None:
    for count in (1, 2):
        values = torch.arange(count)
        with FakeTensorMode():
            given = torch.empty(count, dtype=torch.int64)
            halved = _HALVED(given, 2)
        set_known(given, values)
        assert (Knowledge().compute(_HALVED, (given, 2), {}, [given], halved) is not None) is (count == 1)
