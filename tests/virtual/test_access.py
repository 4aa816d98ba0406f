"""The memory access of operators, by name and strides, and the caller that launches each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autotune.core.step_time import Caller
from autotune.virtual import trace
from autotune.virtual.cost.roofline import Access, Kind
from autotune.virtual.kernels import flash, flex
from autotune.virtual.operators.work import operator_work

ROWS, WIDTH = 256, 512
DEFINED = flash, flex
"""Modules that define operators."""


@pytest.mark.parametrize(
    ("run", "access"),
    [
        (lambda x: x * 2, Access.POINTWISE),
        (lambda x: x + x[0], Access.POINTWISE),
        (lambda x: x.t() * 2, Access.POINTWISE),
        (lambda x: x[:, ::2] * 2, Access.STRIDED),
        (lambda x: x.mean(-1), Access.REDUCTION),
        (lambda x: functional.layer_norm(x, [WIDTH]), Access.NORM),
        (lambda x: x.softmax(-1), Access.SOFTMAX),
        (lambda x: functional.embedding(torch.zeros(ROWS, dtype=torch.long, device=x.device), x), Access.GATHER),
    ],
    ids=["product", "broadcast", "transposed", "slice", "mean", "norm", "softmax", "embedding"],
)
def test_an_operator_is_classified_by_its_name_or_else_by_its_strides(
    run: Callable[[torch.Tensor], torch.Tensor], access: Access
) -> None:
    traced = trace(lambda device: run(torch.empty(ROWS, WIDTH, device=device)))
    found = [each.work.access for each in traced.operators if each.work.kind is Kind.ELEMENTWISE]
    assert found[-1] is access


def test_products_of_batches_are_told_from_others() -> None:
    def multiply(device: torch.device) -> None:
        matrices = torch.empty(4, WIDTH, WIDTH, device=device)
        matrices @ matrices
        matrices[0] @ matrices[1]

    batched = [each.work.access is Access.BATCHED for each in trace(multiply).operators if each.work.flops > WIDTH**2]
    assert batched == [True, False]


@pytest.mark.parametrize(("width", "passes"), [(8192, [(1, 1), (2, 1)]), (32768, [(3, 1), (3, 1)])])
def test_softmax_reads_a_row_again_that_shared_memory_does_not_hold(width: int, passes: list[tuple[int, int]]) -> None:
    def both_ways(device: torch.device) -> None:
        scores = torch.empty(ROWS, width, device=device, requires_grad=True)
        scores.log_softmax(-1).backward(torch.empty(ROWS, width, device=device))

    size = 4 * ROWS * width
    works = [each.work for each in trace(both_ways).operators if each.work.access is Access.SOFTMAX]
    assert [(work.bytes_read // size, work.bytes_written // size) for work in works] == passes


def test_attention_knows_its_length_and_its_direction() -> None:
    def attend(device: torch.device) -> None:
        query, key, value = (
            torch.empty(1, 2, 96, 64, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)
        )
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    works = [each.work for each in trace(attend).operators if each.work.kind is Kind.ATTENTION]
    assert [(work.length, work.backward) for work in works] == [(96, False), (96, True)]


@pytest.mark.parametrize(
    ("namespace", "size", "more"),
    [
        ("autotune_flex_attention", (2, 4, 1024, 64), ()),
        ("autotune_flash_attn", (2, 1024, 4, 64), (2,)),
    ],
    ids=["flex", "flash"],
)
def test_the_length_of_causal_rows_follows_from_their_pairs(namespace: str, size: tuple[int, ...], more: Any) -> None:
    tokens, rows, operator = 1024, 2, getattr(torch.ops, namespace).forward.default
    query = torch.empty(size, dtype=torch.bfloat16, device="meta")
    args = (query, query, query, rows * tokens**2 // 2, *more)
    assert operator_work(operator, args, {}, operator(*args), device_type="meta").length == tokens


_aten = torch.ops.aten


class Doubled(torch.autograd.Function):
    """A function with a backward pass in Python."""

    @staticmethod
    def forward(_ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.mul(2)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].mul(2)


def plain(layer: nn.Module, given: torch.Tensor) -> None:
    with torch.no_grad():
        layer(given)


def trained(layer: nn.Module, given: torch.Tensor) -> None:
    layer(given).sum().backward()


def checkpointed(layer: nn.Module, given: torch.Tensor) -> None:
    checkpoint(layer, given, use_reentrant=False).sum().backward()


def selective(layer: nn.Module, given: torch.Tensor) -> None:
    contexts = partial(create_selective_checkpoint_contexts, [_aten.mm.default])
    checkpoint(layer, given, use_reentrant=False, context_fn=contexts).sum().backward()


def in_function(layer: nn.Module, given: torch.Tensor) -> None:
    Doubled.apply(given).sum().backward()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("run", "callers"),
    [
        (plain, [Caller.PLAIN] * 2),
        (trained, [Caller.MODULE] * 2 + [Caller.ENGINE] * 3),
        # The recomputation ends with the last tensor that was saved, which is the relu's.
        (checkpointed, [Caller.HOOKED] * 4 + [Caller.ENGINE] * 3),
        # The product is saved, so that the recomputation does not run it.
        (selective, [Caller.SELECTIVE] * 3 + [Caller.ENGINE] * 3),
        (in_function, [Caller.PLAIN] * 2),
    ],
)
def test_operators_know_who_launches_them(target: Any, run: Any, callers: list[Caller]) -> None:
    def once(device: torch.device) -> None:
        layer = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()).to(device)
        run(layer, torch.empty(4, 8, device=device, requires_grad=True))

    counted = ("mm", "relu", "threshold_backward", "mul")
    found = [each.work.caller for each in trace(once, target=target).operators if each.name.split(".")[1] in counted]
    assert found == callers
