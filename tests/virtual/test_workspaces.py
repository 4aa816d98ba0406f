"""What CUDA's attention kernels take for themselves in the backward pass, by the sizes in their sources."""

from __future__ import annotations

import pytest
import torch

from autotune.virtual.cuda import scratch
from autotune.virtual.flash import backward_workspace

_aten = torch.ops.aten


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_flash_attention_2_accumulates_queries_in_float32_by_blocks_of_128() -> None:
    blocks = backward_workspace(_tensor(2, 100, 8, 64), _tensor(2, 100, 8, 64), 1, 2)

    assert blocks == (4 * 2 * 8 * 128, 4 * 2 * 8 * 128 * 64)


def test_grouped_heads_are_expanded() -> None:
    *_, keys, values = backward_workspace(_tensor(2, 100, 8, 64), _tensor(2, 100, 2, 64), 1, 2)

    assert keys == values == 2 * (2 * 100 * 8 * 64)


def test_each_packed_document_may_pad_a_block() -> None:
    one, three = (backward_workspace(_tensor(384, 8, 64), _tensor(384, 8, 64), count, 2)[0] for count in (1, 3))

    assert three - one == 4 * 8 * 2 * 128


def test_flash_attention_3_keeps_the_logarithms_too() -> None:
    query = _tensor(1, 256, 8, 128)

    assert len(backward_workspace(query, query, 1, 3)) == len(backward_workspace(query, query, 1, 2)) + 1


@pytest.mark.parametrize("head", [64, 96, 128])
def test_efficient_attention_accumulates_queries_in_float32(head: int) -> None:
    query = _tensor(2, 8, 512, head)
    backward = _aten._scaled_dot_product_efficient_attention_backward.default

    delta, workspace = scratch(backward, (query, query, query, query), {}, (query, query, query, None))

    assert delta == 4 * 2 * 8 * 512
    exact = 4 * 2 * 8 * 512 * -(-head // 64) * 64
    assert exact <= workspace <= 1.01 * exact
