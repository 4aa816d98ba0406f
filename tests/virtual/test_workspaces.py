"""The workspaces of CUDA's attention kernels in the backward pass, by the sizes in their sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from autotune.virtual.kernels import cpu, flex
from autotune.virtual.kernels.cuda import scratch
from autotune.virtual.kernels.flash import backward_workspace
from autotune.virtual.recording.records import Capabilities

_aten = torch.ops.aten
_on_ampere = partial(scratch, gpus=Capabilities((8, 0)))


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


def test_flash_attention_4_adds_gradients_up_for_each_key_in_float32() -> None:
    accumulator, delta, logarithms, keys, values = backward_workspace(
        _tensor(2, 100, 8, 64), _tensor(2, 100, 2, 64), 1, 4
    )

    assert accumulator == 64 * delta == 64 * logarithms == 4 * 2 * 8 * 128 * 64
    assert keys == values == 4 * 2 * 2 * 128 * 64


@pytest.mark.parametrize(("rows", "alike"), [(16_384, {(9, 0)}), (4, {(8, 6), (9, 0), (12, 0)})])
def test_a_gpu_is_alike_only_if_reductions_have_the_workspaces_that_they_have_on_it(
    rows: int, alike: set[tuple[int, int]]
) -> None:
    given, total, gpus = _tensor(rows, 4096), _tensor(4096), Capabilities((9, 0), {(8, 6), (9, 0), (12, 0)})

    scratch(_aten.sum.dim_IntList, (given, [0]), {}, total, gpus=gpus)

    assert gpus.alike == alike


def test_sums_over_rows_have_the_same_partial_results_in_either_order_of_the_dimensions() -> None:
    given, total = _tensor(16_384, 512), _tensor(512)

    taken = _on_ampere(_aten.sum.dim_IntList, (given, [0]), {}, total)

    assert taken == _on_ampere(_aten.sum.dim_IntList, (given.t(), [1]), {}, total) != ()


def test_cudnn_takes_one_block_for_deltas_and_gradients_of_queries_in_float32() -> None:
    query = _tensor(2, 8, 100, 64)
    backward = _aten._scaled_dot_product_cudnn_attention_backward.default

    assert _on_ampere(backward, (query, query, query, query), {}, None) == (4 * 2 * 8 * 100 * (1 + 64),)


def test_cudnn_accumulates_no_gradients_of_large_heads_on_blackwell() -> None:
    query = _tensor(2, 8, 100, 256)
    backward = _aten._scaled_dot_product_cudnn_attention_backward.default
    gpus = Capabilities((10, 0), {(9, 0), (10, 0), (10, 3)})

    taken = scratch(backward, (query,) * 4, {}, None, gpus=gpus)

    assert (taken, gpus.alike) == ((4 * 2 * 8 * 100,), {(10, 0), (10, 3)})


def test_cudnns_frontend_holds_nothing_for_grouped_heads() -> None:
    query, key = _tensor(2, 8, 100, 64), _tensor(2, 2, 100, 64)
    backward = _aten._scaled_dot_product_cudnn_attention_backward.default

    assert _on_ampere(backward, (query, query, key, key), {}, None) == _on_ampere(backward, (query,) * 4, {}, None)


def test_flex_attention_takes_a_float32_for_each_query_and_head() -> None:
    query = _tensor(2, 8, 100, 64)

    assert flex.backward_workspace(query) == (4 * 2 * 8 * 100,)


@pytest.mark.parametrize("head", [64, 96, 128])
def test_efficient_attention_accumulates_queries_in_float32(head: int) -> None:
    query = _tensor(2, 8, 512, head)
    backward = _aten._scaled_dot_product_efficient_attention_backward.default

    delta, workspace = _on_ampere(backward, (query, query, query, query), {}, (query, query, query, None))

    assert delta == 4 * 2 * 8 * 512
    exact = 4 * 2 * 8 * 512 * -(-head // 64) * 64
    assert exact <= workspace <= 1.01 * exact


def test_efficient_attention_holds_gradients_of_each_query_head_that_shares_a_key() -> None:
    query, key = _tensor(2, 8, 512, 64), _tensor(2, 2, 512, 64)
    backward = _aten._scaled_dot_product_efficient_attention_backward.default

    *_, keys, values = _on_ampere(backward, (query, query, key, key), {}, (query, key, key, None))

    assert keys == values == 2 * 2 * 8 * 512 * 64


@pytest.mark.parametrize("kernels", [_on_ampere, cpu.scratch], ids=["cuda", "cpu"])
def test_softmax_copies_what_is_not_contiguous(kernels: Callable[..., tuple[int, ...]]) -> None:
    logits = _tensor(2, 10, 7, dtype=torch.float32)
    forward, backward = _aten._log_softmax.default, _aten._log_softmax_backward_data.default

    assert kernels(forward, (logits, -1, False), {}, logits) == ()
    assert kernels(forward, (logits[:, 3:-1], -1, False), {}, logits) == (4 * 2 * 6 * 7,)
    assert kernels(backward, (logits, logits[:, 3:], -1, torch.float32), {}, logits) == (4 * 2 * 7 * 7,)
