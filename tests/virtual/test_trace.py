"""Traces of plain PyTorch code, without TRL."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from autotune.virtual import phase, trace
from autotune.virtual.cost.roofline import Kind
from autotune.virtual.engine.dispatch import UnknownShapeError
from autotune.virtual.recording.records import Category, Place
from tests.virtual.reference import phases_on_cpu, run_on_cpu


def _training_of_a_small_network(device: torch.device) -> None:
    with device:
        network = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(network.parameters())
    for number in range(2):
        with phase(f"optimizer step {number}"):
            batch = torch.randn(32, 64).to(device)
            network(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_training_loop_has_the_peak_that_the_cpu_has() -> None:
    traced = trace(_training_of_a_small_network, target="cpu")
    real = run_on_cpu(_training_of_a_small_network)

    for name, expected in real.items():
        assert traced.phase(name).device_peak.bytes == pytest.approx(expected.peak_bytes, rel=0.002)


def test_phases_of_one_name_are_compared_with_the_cpu_in_their_order() -> None:
    def growing(device: torch.device) -> None:
        held = []
        for words in (256, 1024, 4096):
            with phase("outer"), phase("inner"):
                held.append(torch.empty(words, device=device))

    traced = [found.device_peak.bytes for found in trace(growing, target="cpu").phases if found.name == "inner"]
    real = phases_on_cpu(growing, {"inner"}.__contains__)

    assert [found.peak_bytes for found in real] == traced == [1024, 5120, 21504]
    assert run_on_cpu(growing, phases="inner") == {"inner": real[0]}


def test_what_a_processor_borrows_within_a_product_in_half_precision_is_not_held_against_a_trace() -> None:
    def multiply(device: torch.device) -> None:
        with phase("product"):
            rows = torch.zeros(1024, 1024, dtype=torch.bfloat16, device=device)
            assert (rows.t() @ rows).shape == rows.shape

    real, traced = run_on_cpu(multiply, phases="product")["product"], trace(multiply, target="cpu").phase("product")

    assert real.peak_bytes == traced.device_peak.bytes == 2 * 2 * 1024 * 1024


def test_every_byte_of_the_peak_has_a_category() -> None:
    peak = trace(_training_of_a_small_network, target="cpu").phase("optimizer step 1").device_peak

    parameters = 4 * (64 * 256 + 256 + 256 * 8 + 8)
    assert sum(peak.categories.values()) == peak.bytes
    assert peak.categories[Category.PARAMETER] == parameters
    # Two moments per parameter, and one step counter per tensor.
    assert peak.categories[Category.OPTIMIZER_STATE] == 2 * parameters + 4 * 4


@pytest.mark.parametrize(
    "take", [lambda weight: (weight * 2).sum(), lambda weight: weight.sum()], ids=["moved", "copied"]
)
def test_gradients_that_no_optimizer_has_seen_are_gradients(take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def backward(device: torch.device) -> None:
        weight = nn.Parameter(torch.ones(64, 64, device=device))
        for _ in range(2):
            take(weight).backward()

    assert trace(backward).device_peak.categories[Category.GRADIENT] == 4 * 64 * 64


def test_allocations_and_frees_come_in_the_order_of_the_code() -> None:
    def fn(device: torch.device) -> None:
        first = torch.empty(100, device=device)
        second = torch.empty(50, device=device)
        del first
        second.resize_(0)
        del second

    events = trace(fn, target="cpu").events

    assert [event.change_bytes for event in events] == [400, 200, -400, -200]
    assert {event.place for event in events} == {Place.DEVICE}


def test_views_take_no_memory() -> None:
    def fn(device: torch.device) -> None:
        torch.empty(8, 8, device=device).view(4, 16).transpose(0, 1)[1:]

    assert trace(fn, target="cpu").device_peak.bytes == 4 * 64


def test_operators_come_with_their_shapes_bytes_and_work() -> None:
    def fn(device: torch.device) -> None:
        torch.empty(16, 32, device=device) @ torch.empty(32, 8, device=device)

    operator = trace(fn, target="cpu").operators[-1]

    assert operator.name == "aten.mm.default"
    assert operator.shapes == ((16, 32), (32, 8), (16, 8))
    assert operator.work.flops == 2 * 16 * 32 * 8
    assert operator.work.bytes_read == 4 * (16 * 32 + 32 * 8)
    assert operator.work.bytes_written == 4 * 16 * 8


def test_shapes_that_follow_from_integers_are_known() -> None:
    seen = []

    def fn(device: torch.device) -> None:
        labels = torch.tensor([5, -100, 7, -100, 9], device=device)
        seen.append(torch.empty(5, 4, device=device)[labels != -100].shape)
        seen.append((labels != -100).sum().item())

    trace(fn, target="cpu")

    assert seen == [(3, 4), 3]


def test_what_is_read_of_floating_point_data_is_counted_as_assumed() -> None:
    def fn(device: torch.device) -> None:
        torch.empty(3, device=device).sum().item()

    assert trace(fn, target="cpu").assumptions == {"a float read from a tensor is 1 (in fn of test_trace.py)": 1}


def test_a_shape_that_follows_from_floating_point_data_is_refused() -> None:
    def fn(device: torch.device) -> None:
        torch.empty(3, device=device).nonzero()

    with pytest.raises(UnknownShapeError, match="depends on data"):
        trace(fn, target="cpu")


@pytest.mark.skipif(find_spec("fla") is not None, reason="the layers' kernels are installed")
@pytest.mark.skipif(Version(version("transformers")) < Version("5.17"), reason="transformers warns elsewhere")
def test_layers_whose_kernels_are_not_installed_are_assumed_to_run_reference_code() -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"), 32)
    heads = dict.fromkeys(("num_attention_heads", "linear_num_value_heads", "linear_num_key_heads"), 2)
    widths = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16)
    few = {"num_hidden_layers": 2, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1}
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(**sizes, **heads, **widths, **few, layer_types=kinds)

    def fn(device: torch.device) -> None:
        Qwen3NextForCausalLM(config).to(device)(input_ids=torch.zeros(1, 64, dtype=torch.long, device=device))

    assumed = [each for each in trace(fn, target="cpu").assumptions if "flash-linear-attention" in each]
    assert len(assumed) == 1
    assert "chunk_gated_delta_rule" in assumed[0]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_a_product_with_a_weight_in_4_bits_counts_its_multiplications_in_both_passes() -> None:
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import QuantState

    rows, width = 1024, 256

    def multiply(device: torch.device) -> None:
        given = torch.empty(4, rows // 4, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        weight = torch.empty(width * width // 2, 1, dtype=torch.uint8, device=device)
        scales, code = torch.empty(width * width // 64, device=device), torch.empty(16, device=device)
        state = QuantState(scales, torch.Size((width, width)), code, 64, "nf4", torch.bfloat16)
        matmul_4bit(given, weight, quant_state=state).sum().backward()

    products = [each.work for each in trace(multiply, capability=(8, 0)).operators if each.work.kind is Kind.MATMUL]
    assert [(work.flops, work.dtype) for work in products] == [(2 * rows * width * width, "bfloat16")] * 2
