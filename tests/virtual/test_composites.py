"""Operators of libraries that run as several others do, held against the libraries' own code on real tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotune.virtual import trace
from autotune.virtual.costs import Kind

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")
ROWS, INPUTS, OUTPUTS = 8, 32, 16


def product(device: torch.device) -> torch.Tensor:
    """Return a product with weights of 8 bits, of inputs that all lie beyond the threshold."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    state = bitsandbytes.MatmulLtState()
    state.threshold, state.has_fp16_weights, state.use_pool = 6.0, False, True
    state.CB = torch.ones(OUTPUTS, INPUTS, dtype=torch.int8, device=device)
    state.SCB = torch.ones(OUTPUTS, device=device)
    given = torch.full((ROWS, INPUTS), 100.0, dtype=torch.bfloat16, device=device, requires_grad=True)
    found: torch.Tensor = MatMul8bitLt.apply(given, state.CB, None, None, state)
    return found


def test_a_product_in_8_bits_keeps_a_copy_of_columns_with_outliers_and_a_trace_takes_all_to_have_some() -> None:
    kept: list[list[tuple[torch.Size, torch.dtype]]] = []

    def note(device: torch.device) -> None:
        tensors = product(device).grad_fn.tensors
        kept.append([(tensor.shape, tensor.dtype) for tensor in tensors if tensor is not None])

    note(torch.device("cpu"))
    traced = trace(note)
    assert kept[0] == kept[1] == [((ROWS, INPUTS), torch.bfloat16)] * 2
    # Whether there are any is read by the host, for each product.
    assert [each.work.kind for each in traced.operators].count(Kind.SYNCHRONIZE) == 1
    assert any("has an outlier" in each for each in traced.assumptions)


def test_reading_a_value_of_the_device_is_noted() -> None:
    def read(device: torch.device) -> None:
        layer = nn.Linear(4, 4).to(device)
        layer(torch.ones(1, 4, device=device)).sum().item()
        torch.equal(torch.ones(1, device=device), torch.ones(1, device=device))
        torch.ones(1).item()

    kinds = [each.work.kind for each in trace(read).operators]
    assert kinds.count(Kind.SYNCHRONIZE) == 2
