"""Who has the host launch an operator, told by the frames and hooks of real training code."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autotune.core.step_time import Caller
from autotune.virtual import trace

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
