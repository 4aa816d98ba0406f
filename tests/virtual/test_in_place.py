"""Gradients that PyTorch fills in place for real tensors alone, held against the CPU's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autotune.virtual import phase, trace
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
