"""A module that is moved or cast in a trace keeps its parameter objects, as in PyTorch."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from autotune.virtual import phase, trace
from autotune.virtual.recording.records import Category, Trace
from tests.virtual.reference import run_on_cpu

Build = Callable[[], nn.Module]


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64, bias=False))


def _tied() -> nn.Module:
    network = _plain()
    tied: Any = nn.Linear(64, 256)
    tied.weight = network[0].weight
    return nn.Sequential(network, tied)


def _parametrized() -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.scale

    network: Any = _plain()
    parametrize.register_parametrization(network[0], "weight", Scaled())
    parametrizations.weight_norm(network[3])
    return network


MODELS: dict[str, Build] = {"plain": _plain, "tied": _tied, "parametrized": _parametrized}
ORDERS = list(itertools.permutations(("optimizer", "move", "cast")))


def _training(build: Build, order: tuple[str, ...]) -> Callable[[torch.device], None]:
    """Return a loop that makes its optimizer, moves and casts its model in this order, and trains for two steps."""

    def run(device: torch.device) -> None:
        model = build()
        optimizer = None
        for what in order:
            if what == "optimizer":
                optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            elif what == "move":
                model.to(device)
            else:
                model.to(torch.float64)
        assert optimizer is not None
        for number in range(2):
            with phase(f"optimizer step {number}"):
                batch = torch.ones(32, 64, dtype=torch.float64, device=device)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(optimizer.state) == len(list(model.parameters()))
        assert all(parameter.device.type == device.type for parameter in optimizer.state)

    return run


def _bytes_of(traced: Trace, category: Category) -> int:
    return traced.phase("optimizer step 1").device_peak.categories.get(category, 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_the_optimizer_has_its_state_whatever_the_order(name: str, order: tuple[str, ...]) -> None:
    run = _training(MODELS[name], order)
    run(torch.device("cpu"))  # that PyTorch itself keeps them

    traced = trace(run)

    assert not traced.assumptions
    expected = trace(_training(MODELS[name], ("move", "cast", "optimizer")))
    assert traced.phase("optimizer step 1").device_peak.bytes == expected.phase("optimizer step 1").device_peak.bytes
    for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE):
        assert _bytes_of(traced, category) == _bytes_of(expected, category)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_the_cpu_has_the_traced_peak_whatever_the_order(name: str, order: tuple[str, ...]) -> None:
    run = _training(MODELS[name], order)
    traced = trace(run, target="cpu")
    for phase_name, real in run_on_cpu(run).items():
        assert traced.phase(phase_name).device_peak.bytes == pytest.approx(real.peak_bytes, rel=0.002)


def test_a_moved_module_holds_the_same_parameters_and_buffers_as_before_where_pytorch_does() -> None:
    def run(device: torch.device) -> None:
        model = _tied()
        model.register_buffer("scale", torch.ones(4))
        held = dict(model.named_parameters())
        for target in (device, torch.float16, "cpu", torch.float32, device):
            model.to(target)
            now = dict(model.named_parameters())
            assert all(parameter is held[name] for name, parameter in now.items())
            assert len(now) == len(held)
            assert all(isinstance(parameter, nn.Parameter) for parameter in now.values())
            assert all(parameter.is_leaf and parameter.requires_grad for parameter in now.values())
            if not isinstance(target, torch.dtype):
                where = torch.device(target).type
                assert {tensor.device.type for tensor in (*now.values(), *model.buffers())} == {where}

    run(torch.device("cpu"))
    trace(run, target="cpu")
    trace(run)


def test_gradients_that_are_there_move_with_their_parameters() -> None:
    def run(device: torch.device) -> None:
        model = _plain()
        model(torch.ones(8, 64)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.to(device).double()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is gradient
            assert gradient is not None
            assert (gradient.device.type, gradient.dtype) == (device.type, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters())
        with phase("optimizer step"):
            optimizer.step()

    run(torch.device("cpu"))
    traced = trace(run).phase("optimizer step")
    count = sum(parameter.numel() for parameter in _plain().parameters())
    # Parameters and gradients come in; two moments stay beside them.
    assert traced.start_bytes == 8 * 2 * count
    assert traced.end_bytes - traced.start_bytes == pytest.approx(8 * 2 * count, rel=0.001)


def test_what_a_moved_module_held_is_given_back_at_once_parameter_by_parameter() -> None:
    def run(device: torch.device) -> None:
        kept = nn.Linear(1000, 1000, bias=False).to(device)
        other = nn.Linear(1000, 1000, bias=False).to(device)
        with phase("cast"):
            kept.to(torch.float64)
            other.to(torch.float64)
        with phase("back"):
            kept.to("cpu")
            other.to("cpu")

    traced = trace(run)
    assert (traced.phase("cast").start_bytes, traced.phase("cast").end_bytes) == (8_000_000, 16_000_000)
    assert traced.phase("cast").device_peak.bytes == 20_000_000
    assert traced.phase("back").end_bytes == 0


def test_hooks_and_attributes_stay_with_a_parameter_that_moves() -> None:
    seen: list[str] = []

    def run(device: torch.device) -> None:
        layer = nn.Linear(4, 4, bias=False)
        weight: Any = layer.weight
        weight.mark = "mine"
        weight.register_hook(lambda _: seen.append("gradient"))
        weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
        layer.to(device)
        layer(torch.ones(2, 4, device=device)).sum().backward()
        assert weight.mark == "mine"

    run(torch.device("cpu"))
    trace(run)
    assert seen == ["gradient", "accumulated"] * 2


def test_data_on_another_device_can_be_given_to_a_parameter_as_pytorch_allows_for_cuda() -> None:
    def run(device: torch.device) -> None:
        layer = nn.Linear(4, 4, bias=False)
        weight = layer.weight
        layer.weight.data = torch.zeros(8, 4, device=device)
        assert layer.weight is weight
        assert (weight.device.type, weight.shape, weight.requires_grad) == (device.type, (8, 4), True)
        assert weight.data.device.type == device.type
        layer(torch.ones(2, 4, device=device)).sum().backward()

    run(torch.device("cpu"))
    trace(run)


def test_a_backward_pass_through_what_has_moved_since_is_refused() -> None:
    def run(device: torch.device) -> None:
        layer = nn.Linear(4, 4)
        loss = layer(torch.ones(2, 4)).sum()
        layer.to(device)
        loss.backward()

    with pytest.raises(RuntimeError, match="moved"):
        trace(run)


def test_a_graph_that_is_left_over_does_not_keep_what_a_parameter_was() -> None:
    def run(device: torch.device) -> None:
        layer = nn.Linear(1000, 1000, bias=False).to(device)
        loss = layer(torch.ones(1, 1000, device=device)).sum()
        loss.backward()
        layer.zero_grad()
        with phase("away"):
            layer.to("cpu")
        assert loss.grad_fn is not None

    assert trace(run).phase("away").end_bytes < 1_000_000


def test_the_copy_of_a_module_belongs_to_the_same_trace() -> None:
    """PEFT copies modules that it trains beside an adapter, such as the head of a reward model."""
    found = []

    def build(device: torch.device) -> None:
        module: Any = nn.Linear(64, 64, device=device)
        # ZeRO-3 gives its parameters the group of its ranks, which cannot be copied.
        module.weight.group, module.bias.requires_grad = threading.Lock(), False
        module.tied = module.weight
        copied: Any = copy.deepcopy(module)
        found.append(copied.weight.fake_mode is module.weight.fake_mode)
        assert copied.weight is copied.tied is not module.weight
        assert (copied.weight.requires_grad, copied.bias.requires_grad) == (True, False)
        assert isinstance(copied.weight, nn.Parameter)
        assert not hasattr(copied.weight, "group")

    traced = trace(build, target="cuda")
    assert found == [True]
    assert traced.device_peak.bytes == 2 * 4 * (64 * 64 + 64)


@pytest.mark.parametrize("width", [0, 8], ids=["buffers alone", "beside parameters"])
def test_buffers_that_are_moved_are_counted_as_buffers(width: int) -> None:
    def training(device: torch.device) -> None:
        layer = nn.Module()
        layer.register_buffer("table", torch.zeros(32, 32))
        layer.weight = nn.Parameter(torch.zeros(32, width)) if width else None
        layer.to(device)
        (torch.ones(32, 32, device=device, requires_grad=True) * layer.table).sum().backward()

    assert trace(training).device_peak.categories[Category.BUFFER] == 4 * 32 * 32
