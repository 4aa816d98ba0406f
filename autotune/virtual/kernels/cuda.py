"""Workspaces of CUDA kernels, each rule with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotune.virtual.kernels import flash, flex
from autotune.virtual.operators.work import GROUPED
from autotune.virtual.operators.workspaces import common, copies, selected
from autotune.virtual.recording.records import Capabilities, Capability
from autotune.virtual.recording.tensors import argument, operator_name, tensors_of

_aten = torch.ops.aten
# Block sizes of queries and keys by largest head size, for GPUs with at least 99 KiB of shared memory per block.
_EFFICIENT_BLOCKS = ((64, (64, 64)), (96, (128, 64)), (128, (128, 128)), (65536, (128, 64)))

_MAX_UNSORTED_INDICES = 3072
_HALF = (torch.bfloat16, torch.float16)
_CASTS_INPUT = frozenset({_aten.sum, _aten.mean, _aten.linalg_vector_norm, _aten.prod, _aten.cumsum, _aten.cumprod})
_SCALAR_BYTES, _COMPOUND_BYTES = 4, 16
_ACCUMULATOR_BYTES = {
    **dict.fromkeys(
        (_aten.sum, _aten.mean, _aten.linalg_vector_norm, _aten.nansum, _aten.amax, _aten.amin), _SCALAR_BYTES
    ),
    # Mean, squares and counts; or a number and its index.
    **dict.fromkeys((_aten.var, _aten.std, _aten.var_mean, _aten.std_mean), _COMPOUND_BYTES),
    **dict.fromkeys((_aten.max, _aten.min, _aten.argmax, _aten.argmin), _COMPOUND_BYTES),
}
"""Bytes of the accumulator of one output, by reduction; a scalar accumulator is at least as large as the output."""
# aten/src/ATen/native/cuda/Reduce.cuh: ReduceConfig and setReduceConfig.
_WARP = 32
_MAX_THREADS = 512
_OUTPUTS_PER_THREAD = 4
_MIN_PER_THREAD, _MAX_PER_THREAD = 16, 256
_SEMAPHORE_BYTES = 4
# Multiprocessors of one GPU of each compute capability (V100, T4, A100, RTX 3090, L40S, H100, B200, RTX PRO 6000), and
# the threads that each has at most (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_MULTIPROCESSORS = {
    (7, 0): (80, 2048), (7, 5): (40, 1024), (8, 0): (108, 2048), (8, 6): (82, 1536), (8, 9): (142, 1536),
    (9, 0): (132, 2048), (10, 0): (148, 2048), (12, 0): (188, 1536),
}  # fmt: skip
_CUDNN_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward
_GROUPED = _aten._grouped_mm.default
_INDEX_PUT = _aten.index_put.default
_MAX_BLOCK_SORT, _SEGMENTED_ROWS = 4096, 128
# Hopper, and Blackwell of data centres.
_GROUPED_KERNEL_GENERATIONS = (9, 10)


def scratch(func: Any, args: Any, kwargs: Any, result: Any, *, gpus: Capabilities) -> tuple[int, ...]:
    """Return the bytes of the blocks that an operator's CUDA kernel allocates and frees before it returns.

    Args:
        gpus: compute capabilities, on which some workspaces depend.
    """
    packet = func.overloadpacket
    if packet in _CASTS_INPUT or packet in _ACCUMULATOR_BYTES:
        dimensions = argument(func, args, kwargs, "dim")
        return gpus.decide(lambda capability: _reduction(func, args[0], dimensions, result, capability))
    if packet is _CUDNN_BACKWARD:
        return gpus.decide(lambda capability: _cudnn_backward(args[1], capability))
    rule = _RULES.get(operator_name(func))
    return common(func, args) if rule is None else rule(args, kwargs, result)


def kernels_in_a_row(func: Any, args: Any, kwargs: Any, *, gpus: Capabilities) -> int:
    """Return the number of kernels of a grouped matrix product that are launched one by one; 1 for other operators.

    aten/src/ATen/native/cuda/GroupedBlas.cpp, ``_grouped_mm_cuda``: in bfloat16, some GPUs have one kernel for all
    groups. Otherwise the host reads the offsets and launches one product per group, in ``_grouped_mm_fallback`` of
    aten/src/ATen/native/GroupedMMUtils.h or in transformers' ``integrations/moe.py``.

    Args:
        gpus: compute capabilities, on which the implementation depends.
    """
    each, offsets = GROUPED.get(operator_name(func)), argument(func, args, kwargs, "offs")
    if each is None or offsets is None:
        return 1
    in_bf16 = func is _GROUPED and args[0].dtype == torch.bfloat16
    if in_bf16 and gpus.decide(lambda capability: capability[0] in _GROUPED_KERNEL_GENERATIONS):
        return 1
    return int(each * offsets.numel())


def _softmax_backward(gradient: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
    # aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: the product of gradient and output is a temporary
    # tensor, and a non-contiguous output is copied.
    product = torch.result_type(gradient, output).itemsize * gradient.numel()
    copied = () if output.is_contiguous() else (output.numel() * output.itemsize,)
    return (product, *copied)


def _embedding_backward(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, padding: int, scaled: bool
) -> tuple[int, ...]:
    # aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda: more than 3,072 indices are sorted.
    # EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel: segments of up to 10 gradient rows with the same index
    # are summed, each into a float32 row padded to whole warps.
    count = indices.numel()
    if count <= _MAX_UNSORTED_INDICES and not scaled:
        return ()
    distinct, width = min(count, rows), -(-gradient.size(-1) // 32) * 32
    segments = count // 10 + distinct
    each = indices.itemsize
    return (each * count,) * 3 + (each * distinct,) * 2 + (each * segments, 4 * segments * width)


def _cudnn_backward(query: torch.Tensor, capability: Capability) -> tuple[int, ...]:
    # aten/src/ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_bprop: one block of the size that cuDNN's graph requests, the
    # sum of the frontend's part and the engine's. https://github.com/NVIDIA/cudnn-frontend,
    # include/cudnn_frontend/node/scaled_dot_product_flash_attention.h, CompositeSDPABackwardNode: the frontend's part
    # is softmax_sum and dQ_accum in float32. With grouped heads, dK_fullhead and dV_fullhead are virtual tensors unless
    # sizes are ragged; whether the engine stores them is not published, and they are not counted.
    # For head size 256 on Blackwell, it is softmax_sum alone (observed on a null GPU with PyTorch 2.14.1).
    # Sizes are [B, H, tokens, D].
    batch, heads, tokens, head = query.shape
    accumulated = 0 if capability[0] == 10 and head == 256 else head
    return (4 * batch * heads * tokens * (1 + accumulated),)


def _efficient_backward(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    # aten/src/ATen/native/transformers/cuda/attention_backward.cu, _efficient_attention_backward: delta in float32, and
    # the kernel's workspace (mem_eff_attention/kernel_backward.h, workspace_size): the float32 gradient of the queries,
    # in tiles with 16 extra bytes each, and per key split that of keys and values if the head size exceeds the tile.
    # Tile sizes are those of kernels/cutlassB.h, in its order. With grouped-query attention, also the gradients of keys
    # and values per query head (observed on a null GPU with PyTorch 2.14.1).
    # Sizes are [B, H, tokens, D].
    batch, heads, tokens, head = query.shape
    rows, columns = next(block for size, block in _EFFICIENT_BLOCKS if head <= size)
    delta = 4 * batch * heads * tokens
    elements = -(-tokens // rows) * -(-head // columns) * (4 + rows * columns)
    in_registers = query.itemsize == 2 and head <= rows
    if query.itemsize == 2 and not in_registers:
        splits = max(1, min(-(-key.size(2) // columns), 200 // (batch * heads)))
        elements += 2 * splits * columns * -(-head // rows) * rows
    workspaces = (delta, 4 * batch * heads * elements)
    if heads == key.size(1):
        return workspaces
    expanded = batch * heads * key.size(2) * head * key.itemsize
    return (*workspaces, expanded, expanded)


def _masked_scatter(args: Any, *_: Any) -> tuple[int, ...]:
    # aten/src/ATen/native/cuda/IndexKernel.cpp, masked_scatter__cuda, and IndexKernel.cu, launch_masked_scatter_kernel:
    # an int64 prefix sum of the mask, and a copy of the mask if it is broadcast or not contiguous.
    elements, mask = args[0].numel(), args[1]
    return (8 * elements,) if mask.is_contiguous() and mask.numel() == elements else (8 * elements, elements)


def _masked_select(args: Any, _: Any, result: torch.Tensor) -> tuple[int, ...]:
    # The same file, masked_select_out_cuda_impl: it indexes with the mask, whose nonzero positions it computes first.
    # The backward pass of masked_scatter does the same (TensorAdvancedIndexing.cpp, masked_scatter_backward_symint).
    return (8 * max(tensor.dim() for tensor in args[:2]) * result.numel(),)


def _gemm_4bit(args: Any, kwargs: Any, _result: Any) -> tuple[int, ...]:
    # bitsandbytes/backends/cuda/ops.py: for more than a few rows, nested scales are dequantised, then the weight, which
    # is then multiplied. Arguments: (A, B, shapeB, absmax, blocksize, quant_type).
    weight = args[2][0] * args[2][1]
    nested = 4 * -(-weight // args[4]) if kwargs.get("absmax_8bit") is not None else 0
    return (nested, weight * args[0].itemsize)


def _int8_dequant(_args: Any, _kwargs: Any, result: Any) -> tuple[int, ...]:
    # bitsandbytes/backends/cuda/ops.py, int8_mm_dequant: its kernel writes float16.
    return (0 if result.dtype == torch.float16 else 2 * result.numel(),)


def _reduction(
    func: Any, source: torch.Tensor, dimensions: Any, result: Any, capability: Capability
) -> tuple[int, ...]:
    """Return the bytes of the blocks that a reduction allocates and frees before it returns.

    Args:
        func: the reduction.
        source: its input.
        dimensions: the reduced dimension or dimensions; empty or None for all.
        result: its return value.
        capability: compute capability of the GPU.
    """
    # aten/src/ATen/native/ReduceOps.cpp, make_reduction_from_out_ty and sum_out: the input is first cast to the dtype
    # of the result, except from half precision to float32, where CUDA's kernels cast on load.
    packet, result = func.overloadpacket, tensors_of(result)[0]
    cast = source.dtype != result.dtype and not (source.dtype in _HALF and result.dtype == torch.float32)
    casts = (source.numel() * result.itemsize,) if cast and packet in _CASTS_INPUT else ()
    if packet not in _ACCUMULATOR_BYTES or not result.numel():
        return casts
    inner_size = _inner_size(source, [dimensions] if isinstance(dimensions, int) else dimensions)
    minimum = _ACCUMULATOR_BYTES[packet]
    accumulated = max(minimum, result.itemsize) if minimum == _SCALAR_BYTES else minimum
    return (*casts, *_partial_results(source.numel(), inner_size, result.numel(), accumulated, capability))


def _partial_results(
    elements: int, inner_size: int, outputs: int, accumulated: int, capability: Capability
) -> tuple[int, ...]:
    """Return the bytes of the partial results of thread blocks and of their semaphores.

    Reductions over the contiguous dimension are left out: their partial results take a few KiB.

    Args:
        elements: number of elements of the input.
        inner_size: see :func:`_inner_size`.
        outputs: number of elements of the result.
        accumulated: bytes that each thread accumulates for an output.
        capability: compute capability of the GPU.
    """
    inputs = elements // outputs
    if inner_size == 1 or inputs == 1:
        return ()
    vector = next(size for size in (_OUTPUTS_PER_THREAD, 2, 1) if inner_size % size == 0)
    max_threads = _MAX_THREADS // vector
    first, second = (_power_of_two_below(min(count, max_threads)) for count in (outputs // vector, inputs))
    height = min(second, max_threads // min(first, _WARP))
    width = min(first, max_threads // height)
    # Threads along a block's y dimension share the inputs of an output; with few inputs, each has its own output.
    if inputs < min(height * _MIN_PER_THREAD, _MAX_PER_THREAD):
        return ()
    per_thread = -(-inputs // height)
    columns = -(-outputs // (width * vector))
    processors, threads = _MULTIPROCESSORS.get(capability, _MULTIPROCESSORS[8, 0])
    blocks = processors * (threads // (width * height))
    if per_thread < _MAX_PER_THREAD or columns > blocks:
        return ()
    share = max(min(-(-blocks // columns), -(-per_thread // _MIN_PER_THREAD)), -(-per_thread // _MAX_PER_THREAD))
    if share == 1:
        return ()
    return (accumulated * outputs * share * width * vector, _SEMAPHORE_BYTES * columns)


def _inner_size(source: torch.Tensor, dimensions: Any) -> int:
    """Return the size of the dimension with stride 1, or 1 if it is reduced.

    Args:
        source: the input.
        dimensions: the reduced dimensions; empty or None for all.
    """
    if not source.dim() or not dimensions:
        return 1
    reduced = {number % source.dim() for number in dimensions}
    sizes = enumerate(zip(source.shape, source.stride(), strict=True))
    return next((size for number, (size, stride) in sizes if stride == 1 < size and number not in reduced), 1)


def _power_of_two_below(count: int) -> int:
    return 1 << (max(count, 1).bit_length() - 1)


def _index_put(args: Any, kwargs: Any, _: Any) -> tuple[int, ...]:
    # aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel: linear indices and positions, both sorted, and
    # CUB's double buffers, 64 bits each.
    if not argument(_INDEX_PUT, args, kwargs, "accumulate"):
        return common(_INDEX_PUT, args)
    given = [index for index in args[1] if index is not None]
    shapes = ((selected(index) or 1,) if index.dtype is torch.bool else index.shape for index in given)
    places = torch.broadcast_shapes(*shapes).numel()
    return (*(8 * places,) * 4, 16 * places)


def _sort(args: Any, kwargs: Any, _: Any) -> tuple[int, ...]:
    # aten/src/ATen/native/cuda/Sort.cpp: a block sorts short rows. Sort.cu, launch_stable_sort_kernel: CUB sorts longer
    # ones, with positions and two buffers; several rows in two passes.
    tensor, dimension = args[0], next((each for each in args[1:] if type(each) is int), kwargs.get("dim", -1))
    if not tensor.dim() or tensor.size(dimension) <= _MAX_BLOCK_SORT:
        return ()
    elements, buffers = tensor.numel(), (8 + tensor.itemsize) * tensor.numel()
    passes = (
        (8 * elements, tensor.itemsize * elements) if 1 < elements // tensor.size(dimension) < _SEGMENTED_ROWS else ()
    )
    return (8 * elements, *passes, buffers)


def _count_nonzero(args: Any, *_: Any) -> tuple[int, ...]:
    # aten/src/ATen/native/TensorAdvancedIndexing.cpp, count_nonzero_cuda: a sum of the mask, cast to 64 bits.
    elements = args[0].numel()
    return (8 * elements,) if args[0].dtype is torch.bool else (elements, 8 * elements)


_RULES: Mapping[str, Callable[[Any, Any, Any], tuple[int, ...]]] = {
    # aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: as in FlashAttention 2. Sizes are
    # [B, H, tokens, D]. cuda/attention_backward.cu, _flash_attention_backward: `contiguous()` of gradient and output.
    "aten._scaled_dot_product_flash_attention_backward.default": (
        lambda args, *_: (
            *copies(tensor.transpose(1, 2) for tensor in (args[0], args[4])),
            *flash.backward_workspace(args[1].transpose(1, 2), args[2].transpose(1, 2), 1, 2),
        )
    ),
    "aten._scaled_dot_product_efficient_attention_backward.default": (
        lambda args, *_: _efficient_backward(args[1], args[2])
    ),
    "aten.embedding_dense_backward.default": lambda args, *_: _embedding_backward(*args),
    "aten._softmax_backward_data.default": lambda args, *_: _softmax_backward(args[0], args[1]),
    **dict.fromkeys(flash.BACKWARD, lambda args, *_: flash.backward_workspace(args[1], args[2], args[-2], args[-1])),
    "autotune_flex_attention.backward.default": lambda args, *_: flex.backward_workspace(args[2]),
    "aten.masked_scatter.default": _masked_scatter,
    "aten.masked_scatter_.default": _masked_scatter,
    "aten.masked_scatter_backward.default": _masked_select,
    "aten.masked_select.default": _masked_select,
    **dict.fromkeys(("aten.index_put.default", "aten.index_put_.default"), _index_put),
    **dict.fromkeys(("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList"), _count_nonzero),
    **dict.fromkeys(("aten.sort.default", "aten.sort.stable"), _sort),
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
    "bitsandbytes.int8_mm_dequant.default": _int8_dequant,
}
"""Workspace rules by full operator name: called with positional arguments, named arguments and the result."""
