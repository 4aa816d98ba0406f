"""How operators pass over their tensors, by their names and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from autotune.virtual import flash, flex, trace
from autotune.virtual.costs import Access, Kind
from autotune.virtual.work import operator_work

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
