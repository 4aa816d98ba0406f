"""The work of operators, compared with counts by hand; on the device ``meta`` and the host ``cpu``."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.virtual.cost.roofline import Kind, Work
from autotune.virtual.kernels import flash
from autotune.virtual.operators.work import operator_work

aten = torch.ops.aten
BF16 = 2
FP32 = 4


def test_a_matrix_product_counts_two_operations_per_multiply_add() -> None:
    work = run(aten.mm.default, device(8, 16), device(16, 32))
    assert (work.kind, work.dtype, work.flops) == (Kind.MATMUL, "bfloat16", 2 * 8 * 16 * 32)
    assert work.bytes_read == (8 * 16 + 16 * 32) * BF16
    assert work.bytes_written == 8 * 32 * BF16


def test_a_linear_layer_with_bias_reads_the_bias_too() -> None:
    work = run(aten.addmm.default, device(32), device(8, 16), device(16, 32))
    assert work.flops == 2 * 8 * 16 * 32
    assert work.bytes_read == (32 + 8 * 16 + 16 * 32) * BF16


def test_a_product_that_is_added_in_place_counts_as_any_other() -> None:
    # As TRL's fused head computes gradients in float32 (trl/trainer/chunked_logprob.py, _addmm_fp32).
    matrices = device(8, 16, dtype=torch.float32), device(16, 32, dtype=torch.float32)
    work = run(aten.addmm_.default, device(8, 32, dtype=torch.float32), *matrices)
    assert (work.kind, work.dtype, work.flops) == (Kind.MATMUL, "float32", 2 * 8 * 16 * 32)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="PyTorch's decomposition fails before 2.13")
def test_a_product_that_is_added_up_in_float32_is_one_of_its_matrices_type() -> None:
    # As TRL's fused head computes gradients (trl/trainer/chunked_logprob.py, _addmm_fp32).
    total = device(8, 32, dtype=torch.float32)
    work = run(aten.addmm.dtype_out, total, device(8, 16), device(16, 32), torch.float32, out=total)
    assert (work.kind, work.dtype, work.flops) == (Kind.MATMUL, "bfloat16", 2 * 8 * 16 * 32)


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((48, 16), (4, 16, 32), 2 * 48 * 16 * 32),
        ((4, 48, 16), (16, 32), 2 * 48 * 16 * 32),
        ((16, 48), (48, 32), 2 * 16 * 48 * 32),
        ((4, 8, 16), (4, 16, 32), 4 * 2 * 8 * 16 * 32),
    ],
    ids=["rows in groups", "columns in groups", "sums in groups", "a product for each group"],
)
def test_a_product_of_groups_counts_every_row_of_its_group_once(
    a: tuple[int, ...], b: tuple[int, ...], flops: int
) -> None:
    offsets = () if len(a) == len(b) == 3 else (device(4, dtype=torch.int32),)
    work = run(aten._grouped_mm.default, device(*a), device(*b), *offsets)
    assert (work.kind, work.dtype, work.flops) == (Kind.MATMUL, "bfloat16", flops)


def test_a_batched_product_counts_every_batch() -> None:
    assert run(aten.bmm.default, device(4, 8, 16), device(4, 16, 32)).flops == 4 * 2 * 8 * 16 * 32


ATTENTION = [
    (aten._scaled_dot_product_flash_attention.default, (0.0, False), 1.0),
    (aten._scaled_dot_product_flash_attention.default, (0.0, True), 0.5),
    (aten._scaled_dot_product_efficient_attention.default, (None, True, 0.0, False), 1.0),
    (aten._scaled_dot_product_efficient_attention.default, (None, True, 0.0, True), 0.5),
    (aten._scaled_dot_product_cudnn_attention.default, (None, True, 0.0, True), 0.5),
]


@pytest.mark.parametrize(
    ("func", "rest", "share"), ATTENTION, ids=["flash", "flash-causal", "mem", "mem-causal", "cudnn"]
)
def test_attention_is_two_products_of_which_causality_leaves_half(
    func: Any, rest: tuple[Any, ...], share: float
) -> None:
    batch, heads, tokens, width = 2, 4, 128, 64
    work = run(func, *(device(batch, heads, tokens, width) for _ in range(3)), *rest)
    products = 2 * (2 * tokens * tokens * width) * batch * heads
    assert (work.kind, work.flops) == (Kind.ATTENTION, share * products)
    # No score of the square of tokens goes through memory.
    assert work.bytes_read == 3 * batch * heads * tokens * width * BF16
    assert work.bytes_written < 2 * batch * heads * tokens * width * BF16


def test_the_backward_pass_of_attention_is_five_products() -> None:
    q, k, v = (device(2, 4, 128, 64) for _ in range(3))
    out, logsumexp, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)
    work = run(
        aten._scaled_dot_product_flash_attention_backward.default,
        *(out, q, k, v, out, logsumexp, None, None, 128, 128, 0.0, True, seed, offset),
    )
    assert (work.kind, work.flops) == (Kind.ATTENTION, 5 * (2 * 128 * 128 * 64) * 2 * 4 // 2)


def test_heads_that_share_keys_are_multiplied_as_often_as_others() -> None:
    q, k, v = device(2, 4, 128, 64), device(2, 2, 128, 64), device(2, 2, 128, 64)
    flash = aten._scaled_dot_product_flash_attention.default
    args = (q, k, v, 0.0, True)
    assert operator_work(flash, args, {}, (q,), device_type=q.device.type).flops == 2 * 2 * 128 * 128 * 64 * 2 * 4 // 2


FUSED = {
    "efficient": (aten._scaled_dot_product_efficient_attention.default, (True,)),
    "cudnn": (aten._scaled_dot_product_cudnn_attention.default, (True,)),
}


@pytest.mark.parametrize(("queries", "keys"), [(1, 1000), (16, 1000), (1000, 1000), (1000, 16)])
@pytest.mark.parametrize("kernel", FUSED)
def test_attention_in_decoding_passes_over_rows_as_long_as_its_keys(kernel: str, queries: int, keys: int) -> None:
    func, rest = FUSED[kernel]
    assert run(func, device(2, 4, queries, 64), *(device(2, 4, keys, 64) for _ in "kv"), None, *rest).length == 1000


@pytest.mark.parametrize(
    ("kernel", "dtype", "masked", "named"),
    [
        ("cudnn", torch.bfloat16, False, "cudnn"),
        ("cudnn", torch.bfloat16, True, ""),
        ("efficient", torch.bfloat16, False, "efficient"),
        ("efficient", torch.bfloat16, True, "efficient"),
        ("efficient", torch.float32, True, ""),
    ],
)
def test_attention_has_the_kernel_whose_rate_it_reaches(
    kernel: str, dtype: torch.dtype, masked: bool, named: str
) -> None:
    func, rest = FUSED[kernel]
    mask = device(2, 4, 128, 128, dtype=dtype) if masked else None
    assert run(func, *(device(2, 4, 128, 64, dtype=dtype) for _ in "qkv"), mask, *rest).kernel == named


@pytest.mark.parametrize(("version", "named"), [(2, ""), (3, "flash_3"), (4, "flash_3")])
def test_one_query_of_flash_attention_attends_to_all_keys(version: int, named: str) -> None:
    recorder = Recorder()
    with recorder:
        flash._fixed(version, device(2, 1, 4, 64), device(2, 1000, 4, 64), device(2, 1000, 4, 64), causal=True)
    (work,) = (work for work in recorder.works if work.kind is Kind.ATTENTION)
    assert (work.flops, work.kernel) == (4 * 1000 * 64 * 2 * 4, named)
    assert work.length >= 1000


def test_a_convolution_of_groups_is_a_product_for_each_place_of_its_result() -> None:
    given, filters = device(2, 4, 8, 8), device(8, 1, 4, 4)
    work = run(aten.convolution.default, given, filters, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 4)
    assert (work.kind, work.flops) == (Kind.MATMUL, 2 * (2 * 8 * 2 * 2) * (4 * 4))


def test_an_elementwise_operator_reads_its_inputs_and_writes_its_output() -> None:
    work = run(aten.add.Tensor, device(8, 16), device(8, 16))
    assert (work.kind, work.flops) == (Kind.ELEMENTWISE, 8 * 16)
    assert (work.bytes_read, work.bytes_written) == (2 * 8 * 16 * BF16, 8 * 16 * BF16)


def test_a_tensor_that_is_passed_twice_is_read_once() -> None:
    tensor = device(8, 16)
    assert run(aten.mul.Tensor, tensor, tensor).bytes_read == 8 * 16 * BF16


def test_an_expanded_tensor_is_as_large_as_what_lies_in_memory() -> None:
    work = run(aten.add.Tensor, device(8, 16), device(1, 16).expand(8, 16))
    assert work.bytes_read == (8 * 16 + 16) * BF16


def test_an_operator_in_place_writes_what_it_changes() -> None:
    work = run(aten.add_.Tensor, device(8, 16), device(8, 16))
    assert (work.bytes_read, work.bytes_written) == (2 * 8 * 16 * BF16, 8 * 16 * BF16)


def test_filling_a_tensor_reads_nothing() -> None:
    work = run(aten.zero_.default, device(8, 16))
    assert (work.bytes_read, work.bytes_written) == (0, 8 * 16 * BF16)


def test_a_reduction_writes_only_its_result() -> None:
    work = run(aten.sum.dim_IntList, device(8, 16), [1])
    assert (work.flops, work.bytes_read, work.bytes_written) == (8 * 16, 8 * 16 * BF16, 8 * BF16)


def test_a_cast_on_the_device_is_no_copy_between_host_and_device() -> None:
    work = run(aten._to_copy.default, device(8, 16), dtype=torch.float32)
    assert (work.kind, work.bytes_read, work.bytes_written) == (Kind.ELEMENTWISE, 8 * 16 * BF16, 8 * 16 * FP32)


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten.view.default, ([128],)),
        (aten.t.default, ()),
        (aten.detach.default, ()),
        (aten.split.Tensor, (4,)),
        (aten._unsafe_view.default, ([128],)),
        (aten.empty_like.default, ()),
    ],
    ids=str,
)
def test_views_and_allocations_do_nothing(func: Any, rest: tuple[Any, ...]) -> None:
    assert run(func, device(8, 16), *rest).kind is Kind.NOTHING


def test_an_embedding_reads_only_the_rows_that_it_returns() -> None:
    indices = torch.empty(10, dtype=torch.int64, device="meta")
    work = run(aten.embedding.default, device(50_000, 64), indices)
    assert (work.bytes_read, work.bytes_written) == (10 * 64 * BF16 + 10 * 8, 10 * 64 * BF16)


def test_writing_at_indices_changes_only_the_rows_that_are_written() -> None:
    indices = torch.empty(10, dtype=torch.int64, device="meta")
    work = run(aten.index_add_.default, device(50_000, 64), 0, indices, device(10, 64))
    assert (work.bytes_read, work.bytes_written) == (2 * 10 * 64 * BF16 + 10 * 8, 10 * 64 * BF16)


def test_fused_adamw_writes_parameters_and_both_moments_but_not_gradients() -> None:
    lists = [[device(32, 32, dtype=torch.float32), device(8, dtype=torch.float32)] for _ in range(4)]
    steps = [torch.empty((), device="meta") for _ in range(2)]
    work = run(
        aten._fused_adamw_.default, *lists, [], steps,
        lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    elements = 32 * 32 + 8
    assert (work.bytes_read, work.bytes_written) == (4 * elements * FP32 + 2 * FP32, 3 * elements * FP32)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_between_host_and_device_have_their_direction(waits: bool) -> None:
    up = run(aten._to_copy.default, torch.empty(100), device=torch.device("meta"), non_blocking=not waits)
    assert (up.kind, up.bytes_written, up.waits) == (Kind.TO_DEVICE, 400, waits)
    down = run(aten.copy_.default, torch.empty(100), device(100, dtype=torch.float32), not waits, runs=False)
    assert (down.kind, down.bytes_written, down.waits) == (Kind.TO_HOST, 400, waits)


def test_what_the_host_computes_costs_the_device_nothing() -> None:
    assert run(aten.mm.default, torch.empty(8, 8), torch.empty(8, 8)).kind is Kind.NOTHING


def test_reading_a_value_makes_the_host_wait() -> None:
    assert run(aten._local_scalar_dense.default, device(), runs=False).kind is Kind.SYNCHRONIZE


def test_asking_what_a_tensor_is_does_nothing() -> None:
    tensor = device(8, 16)
    work = operator_work(torch.ops.prim.device.default, (tensor,), {}, tensor.device, device_type="meta")
    assert work == Work(Kind.NOTHING)


def test_comparing_tensors_makes_the_host_wait() -> None:
    tensors = (device(8), device(8))
    assert operator_work(aten.equal.default, tensors, {}, True, device_type="meta").kind is Kind.SYNCHRONIZE


def test_a_training_step_of_linear_layers_is_six_operations_per_weight_and_token() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False, device="meta") for _ in range(3)))
    batch = torch.empty(128, 64, device="meta", requires_grad=True)
    recorder = Recorder()
    with recorder:
        model(batch).sum().backward()
    products = sum(work.flops for work in recorder.works if work.kind is Kind.MATMUL)
    assert products == 6 * (3 * 64 * 64) * 128


class Recorder(TorchDispatchMode):
    """Notes the work of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and note its work."""
        result = func(*args, **(kwargs or {}))
        self.works.append(operator_work(func, args, kwargs or {}, result, device_type="meta"))
        return result


def device(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor on the device."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def run(func: Any, *args: Any, runs: bool = True, **kwargs: Any) -> Work:
    """Return the work of an operator; one that ``meta`` cannot do is only described, and returns its first argument."""
    result = func(*args, **kwargs) if runs else args[0]
    return operator_work(func, args, kwargs, result, device_type="meta")


def test_fsdp2_copies_the_shard_of_its_own_rank_alone_before_it_gathers_all() -> None:
    # Defines the operator.
    importlib.import_module("torch.distributed.fsdp")
    shards, every = [torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")], torch.empty(128, device="meta")
    func = torch.ops.fsdp.all_gather_copy_in.default
    args = shards, every, [12, 4], 16, 0
    work = operator_work(func, args, {}, func(*args), device_type="meta")
    assert (work.bytes_read, work.bytes_written) == (64, 64)
