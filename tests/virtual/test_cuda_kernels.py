"""Operators with special kernels on CUDA: their names, and the memory that a trace allocates for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.probing import JobServer
from autotune.units import MIB
from autotune.virtual.engine.device import COMPOSITE, KERNELS, has_kernel
from autotune.virtual.recording.replay import workspace_bytes
from tests.virtual.alone import apart
from tests.virtual.cuda_cases import BYTES, CAPABILITY, CASES, ROWS, WIDTH, traced_cases

_NO_CUDA_BUILD = "torch was built without CUDA, so that its dispatcher has no CUDA kernels"
_NO_GPU = "needs a CUDA device, and there is none"


@pytest.fixture(scope="module")
def traced(job_server: JobServer) -> dict[str, Any]:
    """What traces have, made in a process of their own because the device stays registered in it."""
    return apart(job_server, traced_cases)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("cuda") / "ran.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.virtual.cuda_cases", str(file)]
    # A null GPU's arithmetic on the host, which decides whether there is a mask, is found by PYTHONPATH.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=250)
    return dict(json.loads(file.read_text()))


def in_dispatcher() -> tuple[str, ...]:
    """Return the names of PyTorch's operators with a kernel for CUDA and a composite; none in a build without CUDA."""
    return tuple(
        name
        for name in sorted(torch._C._dispatch_get_all_op_names())
        if torch._C._dispatch_has_kernel(name) and has_kernel(name, "CUDA") and has_kernel(name, COMPOSITE)
    )


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason=_NO_CUDA_BUILD)
def test_the_listed_operators_are_those_of_this_releases_dispatcher() -> None:
    assert in_dispatcher() == KERNELS


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch was built with CUDA")
def test_a_build_without_cuda_has_no_such_operators() -> None:
    assert in_dispatcher() == ()


def test_every_listed_operator_is_one_of_this_pytorch() -> None:
    assert all(torch._C._dispatch_has_kernel(name) for name in KERNELS)


@pytest.mark.parametrize("case", ["silu", "mish"])
def test_the_backward_pass_of_an_activation_allocates_the_gradient_alone(traced: dict[str, Any], case: str) -> None:
    # The input and the output, the gradient that is given, and the one that is made.
    assert traced[case]["tensors"] == 4 * BYTES
    assert f"aten.{case}_backward.default" in traced[case]["operators"]


def test_rms_norm_is_one_operator_in_each_pass(traced: dict[str, Any]) -> None:
    found = traced["rms_norm"]

    assert "aten._fused_rms_norm.default" in found["operators"]
    assert "aten._fused_rms_norm_backward.default" in found["operators"]
    # Beside those of an activation: the weight and its gradient, and a float32 per row.
    assert found["tensors"] == 4 * BYTES + 2 * 2 * WIDTH + 4 * BYTES // (2 * WIDTH)


@pytest.mark.parametrize("case", ["swiglu, checkpointed", "llama, checkpointed"])
def test_gated_layers_have_one_operator_per_activation_in_the_backward_pass(traced: dict[str, Any], case: str) -> None:
    operators = traced[case]["operators"]

    assert operators["aten.silu_backward.default"] == 3 * 2
    assert "aten.sigmoid.default" not in operators


def test_the_backward_pass_of_softmax_on_cuda_has_a_product_beside_the_gradient(traced: dict[str, Any]) -> None:
    assert traced["softmax"]["tensors"] == 5 * BYTES


@pytest.mark.parametrize(
    ("case", "operator"),
    [("largest", "scatter_.src"), ("selected", "index_add_.default"), ("indexed", "index_put_.default")],
)
def test_the_zeros_of_a_gradient_are_filled_in_place(traced: dict[str, Any], case: str, operator: str) -> None:
    operators = traced[case]["operators"]

    assert f"aten.{operator}" in operators
    assert f"aten.{operator.replace('_.', '.')}" not in operators


def test_logsumexp_has_the_temporaries_of_the_operators_that_it_consists_of(traced: dict[str, Any]) -> None:
    operators = traced["log probabilities"]["operators"]

    assert operators["aten.exp_.default"] == operators["aten.amax.default"] == 1


@pytest.mark.parametrize(
    ("case", "tensors"), [("bias", 2 * (16 * BYTES + 2 * WIDTH)), ("lengths of columns", 16 * BYTES + 2 * WIDTH)]
)
def test_what_is_summed_over_rows_has_a_partial_result_for_each_thread_of_a_block(
    traced: dict[str, Any], case: str, tensors: int
) -> None:
    # 1,024 sums of 4,096 rows: blocks of 32 threads for 4 columns each, by 4 for the rows, of which each takes 16.
    partial_results = 4 * WIDTH * (16 * ROWS // 4 // 16) * (32 * 4)
    semaphores = 4 * WIDTH // (32 * 4)

    assert traced[case]["tensors"] == tensors + partial_results + semaphores


def test_memory_that_another_stream_had_is_not_used_again(traced: dict[str, Any]) -> None:
    assert traced["offloaded"]["allocated"] == 48 * MIB
    assert traced["offloaded"]["reserved"] == 96 * MIB


def test_a_cache_that_is_emptied_is_reserved_no_more(traced: dict[str, Any]) -> None:
    assert traced["emptied"]["reserved"] == 64 * MIB


def test_the_gradient_of_many_embedded_tokens_is_summed_by_segments(traced: dict[str, Any]) -> None:
    # Each of 4,096 tokens may be another row, of 2,048, and up to 10 equal ones are a segment.
    assert 4 * WIDTH * (4096 // 10 + 2048) in traced["embedding"]["sizes"]


def test_features_of_images_are_placed_by_sums_of_the_mask_and_their_gradient_is_found_by_its_places(
    traced: dict[str, Any],
) -> None:
    elements = 4 * ROWS * WIDTH
    # Of half of the elements, three indices each.
    assert {8 * elements, 3 * 8 * elements // 2} <= set(traced["images"]["sizes"])


def test_a_layer_norm_copies_what_is_not_contiguous(traced: dict[str, Any]) -> None:
    # In the forward pass its input, in the backward pass that and the gradient.
    assert traced["layer_norm of another order"]["sizes"].count(BYTES) == 4 + 3


def test_a_token_is_drawn_by_a_random_number_for_each_probability(traced: dict[str, Any]) -> None:
    assert traced["drawn"]["sizes"].count(4 * ROWS * WIDTH) == 2


def test_autocast_casts_the_weight_before_the_input(traced: dict[str, Any]) -> None:
    weight, given = 2 * 4 * WIDTH * WIDTH, 2 * ROWS * WIDTH
    sizes = traced["cast"]["sizes"]

    assert sizes.index(weight) < sizes.index(given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=_NO_GPU)
@pytest.mark.parametrize("case", ["cast", "offloaded", "emptied"])
def test_allocations_come_in_the_order_of_pytorchs_own(traced: dict[str, Any], ran: dict[str, Any], case: str) -> None:
    large = [[size for size in found[case]["sizes"] if size >= MIB // 4] for found in (traced, ran)]

    assert large[0] == [size for size in large[1] if size != workspace_bytes(CAPABILITY)]
    assert traced[case]["reserved"] == ran[case]["reserved"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=_NO_GPU)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_pytorchs_own_allocator_has(traced: dict[str, Any], ran: dict[str, Any], case: str) -> None:
    # PyTorch 2.11 has a workspace of 1 MiB for cuBLASLt, which adds biases, in each thread: a trace counts none.
    more = 2 * MIB if case == "llama, biases" else 0
    assert traced[case]["allocated"] == pytest.approx(ran[case]["allocated"], rel=0.005, abs=more)
