"""Code that a trace refuses, with the remedy, and code that it runs differently from PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune import virtual
from autotune.virtual import UnknownShapeError, UnsupportedError, trace, trace_inputs
from autotune.virtual.engine.tracing import Target

OUTER = torch.zeros(4, 8)
MADE_BEFORE = torch.compile(lambda given: given.square().sum())


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 10, device="cuda"),
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: nn.Linear(3, 10, device="cuda:0"),
        lambda: torch.randn(3, 10).to("cuda"),
        lambda: torch.randn(3, 10).cuda(),
        lambda: nn.Linear(3, 10).to("cuda"),
    ],
)
def test_a_tensor_of_cuda_is_refused_for_the_traced_device(make: Callable[[], object], target: Target) -> None:
    # PyTorch's CUDA build looks for a driver before it copies a list to the device.
    refused = r"CUDA device\. Use the `device` that the traced function gets|Found no NVIDIA driver"
    with pytest.raises((UnsupportedError, RuntimeError), match=refused):
        trace(lambda _: make(), target=target)


def test_the_refused_operator_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"aten\.randn\.default makes a tensor on a CUDA device"):
        trace(lambda _: torch.randn(3, device="cuda"))


def test_a_function_that_leaves_its_device_unused_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Nothing ran on the device\. Use the `device`"):
        trace(lambda _: nn.Linear(3, 10)(torch.randn(2, 3)).sum().backward())


def test_a_function_that_makes_no_tensor_needs_no_memory() -> None:
    assert trace(lambda _: None).device_peak.bytes == 0


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="PyTorch 2.11 moves such a tensor, and it is counted")
@pytest.mark.parametrize("outer", [OUTER, nn.Linear(4, 8)])
def test_a_tensor_made_outside_is_refused_with_how_to_hand_it_over(outer: torch.Tensor | nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"made outside of the traced function.*from_config.*trace_inputs"):
        trace(outer.to)


def test_a_tensor_made_outside_can_be_adopted() -> None:
    def hand_over(device: torch.device) -> None:
        trace_inputs({"data": OUTER})["data"].to(device)

    assert trace(hand_over).device_peak.bytes == 4 * OUTER.numel()


def test_other_errors_stay_what_they_are() -> None:
    def failing(_: torch.device) -> None:
        raise RuntimeError("another one")

    with pytest.raises(RuntimeError, match=r"^another one$"):
        trace(failing)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(layer: Callable[..., nn.Module]) -> None:
    def look_up(device: torch.device) -> None:
        layer(100, 8, sparse=True).to(device)(torch.zeros(2, 4, dtype=torch.long, device=device)).sum().backward()

    with pytest.raises(UnsupportedError, match=r"embedding.*with sparse=True has a sparse gradient"):
        trace(look_up)


def _step(device: torch.device, *, compiled: bool) -> None:
    layer = nn.Linear(100, 100).to(device)
    run = torch.compile(layer) if compiled else layer
    run(torch.randn(8, 100, device=device)).sum().backward()


def test_a_compiled_step_is_traced_as_uncompiled_with_a_note() -> None:
    traced = trace(lambda device: _step(device, compiled=True))

    assert traced.device_peak == trace(lambda device: _step(device, compiled=False)).device_peak
    assert traced.assumptions == {"a compiled step needs what the same step needs uncompiled": 1}


def test_a_function_compiled_before_the_trace_is_traced_as_uncompiled() -> None:
    traced = trace(lambda device: MADE_BEFORE(torch.empty(8, 100, device=device, requires_grad=True)).backward())

    assert "aten.pow.Tensor_Scalar" in [operator.name for operator in traced.operators]


def test_data_is_loaded_without_workers() -> None:
    seen: list[tuple[int, ...]] = []

    def load(device: torch.device) -> None:
        loader = DataLoader(TensorDataset(torch.zeros(8, 10)), 4, num_workers=1, timeout=5)
        seen.extend(batch.to(device).shape for (batch,) in loader)
        assert loader.num_workers == 1

    trace(load)

    assert seen == [(4, 10), (4, 10)]


def test_a_shape_of_unknown_values_is_refused_where_pytorch_has_no_rule_for_it() -> None:
    def align(device: torch.device) -> None:
        scores = torch.randn(6, 2, 4, device=device, requires_grad=True)
        lengths = torch.full((2,), 3, dtype=torch.int64, device=device)
        nn.functional.ctc_loss(scores, torch.ones(2, 3, dtype=torch.int64, device=device), 2 * lengths, lengths)

    with pytest.raises(UnknownShapeError, match=r"aten\._ctc_loss\.Tensor returns depends on data"):
        trace(align)


def test_a_mask_of_unknown_values_is_refused_with_the_operator_that_chooses_by_it() -> None:
    def choose(device: torch.device) -> None:
        row = torch.randn(8, device=device)
        assert row[row > 0].numel()

    with pytest.raises(UnknownShapeError, match=r"aten\.index\.Tensor.*depends on data"):
        trace(choose)


def test_code_in_c_that_reads_values_is_refused_with_the_remedy() -> None:
    def cut(device: torch.device) -> None:
        torch.tensor_split(torch.randn(8, device=device), torch.arange(2, 6, 2))

    with pytest.raises(UnsupportedError, match=r"reads the values of a tensor.*Use autotune dry-run"):
        trace(cut)


def test_an_operator_that_fails_in_a_backward_pass_is_refused_by_name() -> None:
    def pool(device: torch.device) -> None:
        given = torch.randn(1, 2, 6, 6, 6, device=device, requires_grad=True)
        nn.FractionalMaxPool3d(2, output_size=2)(given).sum().backward()

    refused = r"cannot derive the shapes of aten\.fractional_max_pool3d_backward\.default\. Use autotune dry-run"
    with pytest.raises(UnsupportedError, match=refused):
        trace(pool)


@pytest.mark.parametrize("package", [autotune, virtual])
def test_public_names_are_listed_and_others_do_not_exist(package: ModuleType) -> None:
    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)
    assert not hasattr(package, "tracee")
