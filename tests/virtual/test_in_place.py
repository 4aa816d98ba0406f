"""Operators that differ for real tensors or run as several, compared with the CPU, and libraries' own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autotune.virtual import phase, trace, trace_inputs
from autotune.virtual.cost.roofline import Kind
from autotune.virtual.recording.records import Category
from tests.virtual.reference import run_on_cpu

_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda given, index: given.gather(0, index[:, None]),
    "max": lambda given, _: given.max(0)[0],
    "topk": lambda given, _: given.topk(2, 0)[0],
    "sort": lambda given, _: given.sort(0)[0],
    "index_select": lambda given, index: given.index_select(0, index),
    "index": lambda given, index: given[index],
    "logsumexp": lambda given, _: given.logsumexp(0),
    "isinf": lambda given, _: given.masked_fill(given.isinf(), 0.0),
    "layer_norm of another order": lambda given, _: nn.functional.layer_norm(
        given.detach().repeat(4, 1).view(16, 16, 256).transpose(0, 1), (256,), given[0]
    ),
    "cumprod of integers": lambda given, _: given[:, :1] * (given == 0).int().cumprod(-1)[:, :1],
    "multinomial": lambda given, _: given[:, :1] * given.detach().exp().multinomial(1),
    "gather in bfloat16": lambda given, index: given.bfloat16().gather(0, index[:, None]),
    "scatter in bfloat16": lambda given, _: given.bfloat16().repeat(4, 1).max(-1)[0],
    "mean in bfloat16": lambda given, _: given.bfloat16().repeat(4, 1).mean(-1),
}


@pytest.mark.parametrize("name", _GRADIENTS)
def test_a_gradient_takes_what_it_takes_on_the_cpu(name: str) -> None:
    def fn(device: torch.device) -> None:
        given = torch.zeros(64, 256, device=device, requires_grad=True)
        index = torch.zeros(8, dtype=torch.int64, device=device)
        with phase("step"):
            made = _GRADIENTS[name](given, index)
            made.backward(torch.empty_like(made))

    real, traced = run_on_cpu(fn, phases="step")["step"], trace(fn, target="cpu").phase("step")

    assert traced.device_peak.bytes == pytest.approx(real.peak_bytes, rel=0.005)


def test_what_the_caller_still_holds_is_copied() -> None:
    class Filled(torch.autograd.Function):
        @staticmethod
        def forward(_: object, given: Tensor) -> Tensor:
            return given.clone()

        @staticmethod
        def backward(_: object, gradient: Tensor) -> Tensor:
            zeros = torch.zeros_like(gradient)
            filled = zeros.scatter_add(0, torch.zeros(64, 256, dtype=torch.int64, device=gradient.device), gradient)
            return filled + zeros

    def fn(device: torch.device) -> None:
        given = torch.zeros(64, 256, device=device, requires_grad=True)
        with phase("step"):
            Filled.apply(given).sum().backward()

    real, traced = run_on_cpu(fn, phases="step")["step"], trace(fn, target="cpu").phase("step")

    assert traced.device_peak.bytes == pytest.approx(real.peak_bytes, rel=0.005)


ROWS, INPUTS, OUTPUTS = 8, 32, 16


def product(device: torch.device) -> torch.Tensor:
    """Return a product with weights of 8 bits, of inputs of which half of the columns lie beyond the threshold."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")
    from bitsandbytes.autograd._functions import MatMul8bitLt

    state = bitsandbytes.MatmulLtState()
    state.threshold, state.has_fp16_weights, state.use_pool = 6.0, False, True
    state.CB = torch.ones(OUTPUTS, INPUTS, dtype=torch.int8, device=device)
    state.SCB = torch.ones(OUTPUTS, device=device)
    halves = [torch.full((ROWS, INPUTS // 2), value, dtype=torch.bfloat16, device=device) for value in (100.0, 1.0)]
    given = torch.cat(halves, dim=1).requires_grad_()
    found: torch.Tensor = MatMul8bitLt.apply(given, state.CB, None, None, state)
    return found


def test_a_product_in_8_bits_keeps_a_copy_of_columns_with_outliers_and_a_trace_takes_half_to_have_some() -> None:
    kept: list[list[tuple[torch.Size, torch.dtype]]] = []

    def note(device: torch.device) -> None:
        tensors = product(device).grad_fn.tensors
        kept.append([(tensor.shape, tensor.dtype) for tensor in tensors if tensor is not None])

    note(torch.device("cpu"))
    traced = trace(note)
    assert kept[0] == kept[1] == [((ROWS, columns), torch.bfloat16) for columns in (INPUTS // 2, INPUTS)]
    # Whether there are any is read by the host, for each product.
    assert [each.work.kind for each in traced.operators].count(Kind.SYNCHRONIZE) == 1
    assert any("have an outlier" in each for each in traced.assumptions)
    copies = [number for number, category in traced.categories.items() if category is Category.OUTLIER]
    assert [sum(event.change_bytes for event in traced.events if event.storage == number and event.change_bytes > 0)
            for number in copies] == [2 * ROWS * INPUTS // 2]  # fmt: skip


def test_reading_a_value_of_the_device_is_noted() -> None:
    def read(device: torch.device) -> None:
        layer = nn.Linear(4, 4).to(device)
        layer(torch.ones(1, 4, device=device)).sum().item()
        torch.equal(torch.ones(1, device=device), torch.ones(1, device=device))
        torch.ones(1).item()

    kinds = [each.work.kind for each in trace(read).operators]
    assert kinds.count(Kind.SYNCHRONIZE) == 2


class Given(NamedTuple):
    """Six numbers, a mask of three of them, and six counts."""

    numbers: Tensor
    mask: Tensor
    counts: Tensor


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        (lambda given: given.mask.nonzero(), 1),
        (lambda given: given.numbers[given.mask], 1),
        (lambda given: given.counts.masked_select(given.mask), 1),
        (lambda given: given.numbers.index_put_((given.mask,), given.numbers[:3]), 1),
        (lambda given: given.counts.unique(), 1),
        (lambda given: torch.repeat_interleave(given.counts), 1),
        (lambda given: given.counts.tolist(), 1),
        (lambda given: given.counts.cpu().tolist(), 0),
        (lambda given: torch.repeat_interleave(given.counts, output_size=15), 0),
        (lambda given: given.numbers.masked_fill_(given.mask, 0.0), 0),
        (lambda given: given.numbers[given.counts], 0),
    ],
    ids=["nonzero", "mask", "masked_select", "index_put", "unique", "repeat_interleave", "tolist", "tolist-on-host",
         "given-size", "masked_fill", "index"],
)  # fmt: skip
def test_the_host_waits_where_values_of_the_device_decide_a_size(run: Callable[[Given], object], waits: int) -> None:
    def read(device: torch.device) -> None:
        mask, counts = (values.to(device) for values in trace_inputs((np.arange(6) % 2 == 0, np.arange(6))))
        run(Given(torch.empty(6, device=device), mask, counts))

    assert [each.work.kind for each in trace(read).operators].count(Kind.SYNCHRONIZE) == waits
