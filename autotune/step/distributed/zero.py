"""Patches DeepSpeed to run on the virtual device: without native operators and reads of values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from autotune.core.plan import TrainingPlan
from autotune.step.distributed.engines import Engine, engine_of
from autotune.techniques.sharding import zero_stage
from autotune.virtual import UnsupportedError, assume, is_tracing, set_category
from autotune.virtual.engine.tracing import moving_gradients
from autotune.virtual.recording.records import Category


@contextmanager
def traceable_deepspeed(device: torch.device, plan: TrainingPlan) -> Iterator[None]:
    """Patch DeepSpeed, if it trains the plan, for the running trace, whose process group has to exist.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    if engine_of(plan) is not Engine.DEEPSPEED or not is_tracing():
        yield
        return
    import deepspeed
    from deepspeed.accelerator import real_accelerator
    from deepspeed.comm import comm
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Zero3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero2
    from deepspeed.utils import groups

    # The package has attributes of the same names as these modules.
    named = ("deepspeed.comm.torch", "deepspeed.ops.adam.cpu_adam", "deepspeed.ops.adam.fused_adam")
    backend, cpu_adam, fused_adam = (sys.modules[name] for name in named)
    with (
        accelerator(device) as virtual,
        mock.patch.object(real_accelerator, "ds_accelerator", virtual),
        # DeepSpeed would compile this operator for shared memory on the host, which a GPU does not use.
        mock.patch.object(backend, "build_shm_op", return_value=None),
        mock.patch.object(Zero2, "has_overflow", _never_overflows(Zero2.has_overflow)),
        mock.patch.object(Zero3, "has_overflow", _never_overflows(Zero3.has_overflow)),
        # ZeRO-2's buffer for gradients; the rank's float32 share that replaces it if `data_types.grad_accum_dtype` is
        # wider than the model's dtype; ZeRO-3's share of gradients, and of weights, which may have a second one among
        # fewer ranks (`zero_hpz_partition_size`).
        _tag_result(Zero2, "copy_grads_in_partition", lambda _, optimizer, *__: optimizer.grads_in_partition),
        _tag_result(Zero2, "_build_compact_grad_partition_buffer", lambda buffers, *_: buffers.flat_partition),
        _tag_result(Zero3, "_setup_for_real_optimizer", lambda _, optimizer: optimizer.grad_partitions_flat_buffer),
        _tag_result(Init, "_partition_param", lambda _, __, parameter, *___: parameter.ds_tensor, Category.PARAMETER),
        _tag_result(
            Init,
            "_partition_param_sec",
            lambda _, __, parameter, *___: parameter.ds_secondary_tensor,
            Category.PARAMETER,
        ),
        mock.patch.object(Zero2, "backward_epilogue", _tagging(Zero2.backward_epilogue)),
        mock.patch.object(
            Zero2, "independent_gradient_partition_epilogue", _tagging(Zero2.independent_gradient_partition_epilogue)
        ),
        mock.patch.object(cpu_adam, "CPUAdamBuilder", _Builder),
        mock.patch.object(fused_adam, "FusedAdamBuilder", _Builder),
        # Other native operators would be compiled for this machine, and do not accept fake tensors.
        mock.patch.object(OpBuilder, "jit_load", _refuse),
        mock.patch.object(NotImplementedBuilder, "load", _refuse),
        mock.patch.object(comm, "cdb", None),
        # It caches process groups for the whole process; those of this trace are destroyed at its end.
        mock.patch.dict(vars(groups)),
        # With ZeRO-2, a whole gradient lives only until it is copied to the buffer of the rank's share, which alone
        # counts as gradients: those persist from one micro-batch to the next.
        moving_gradients() if zero_stage(plan) == 2 else nullcontext(),
    ):
        deepspeed.init_distributed(dist_backend="fake")
        yield


def gradients_of_ranks(plan: TrainingPlan, accelerator: Any) -> tuple[int, ...]:
    """Return the gradient elements that each rank of ZeRO-2 holds between micro-batches, by DeepSpeed's partition.

    A rank holds every tensor whole that its share overlaps (``stage_1_and_2.py``, ``copy_grads_in_partition``).

    Args:
        accelerator: the accelerator of any rank: DeepSpeed's optimizer has the partition of all ranks.

    Returns:
        Empty if all ranks hold the same number, or hold gradients on the host.
    """
    if zero_stage(plan) != 2:
        return ()
    optimizer = accelerator.deepspeed_engine_wrapped.engine.optimizer
    if not getattr(optimizer, "partition_gradients", False) or optimizer.cpu_offload:
        return ()
    elements = [0] * plan.launch.processes
    for group, parts in optimizer.param_to_partition_ids.items():
        if optimizer._use_compact_grad_partition_buffer(group):
            continue
        for parameter, holders in parts.items():
            for rank in holders:
                elements[rank] += optimizer.param_dict[parameter].numel()
    return tuple(elements)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "Of DeepSpeed's native operators only Adam's are traced, and none for offload to nvme, quantised communication "
        "(zero_quantized_weights, zero_quantized_gradients) or another optimizer of its own."
    )


def _fused_update(
    _chunk: int, _skipped: Any, tensors: Any, lr: float, beta1: float, beta2: float, eps: float, *_: Any
) -> None:
    """Replace DeepSpeed's fused update by PyTorch's, which reads and writes the same tensors."""
    gradients, weights, means, squares = tensors
    steps = [means[0].new_ones((), dtype=torch.float32)] * len(weights)
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": 0.0}
    torch._fused_adamw_(weights, gradients, means, squares, [], steps, **numbers, amsgrad=False, maximize=False)


# DeepSpeedCPUAdam updates in C++ through raw addresses, and allocates nothing; its state is allocated in Python.
_ADAM = SimpleNamespace(
    **dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *_: None), multi_tensor_adam=_fused_update
)


class _Builder:
    """Loads replacements of the native functions of DeepSpeed's Adam; those for the host do nothing."""

    def load(self) -> SimpleNamespace:
        return _ADAM


def _never_overflows(check: Callable[..., Any]) -> Callable[..., bool]:
    """Wrap a check for infinite gradients to return False; otherwise DeepSpeed would skip the step."""

    def has_overflow(optimizer: Any, *args: Any, **kwargs: Any) -> bool:
        check(optimizer, *args, **kwargs)
        assume("gradients are finite")
        return False

    return has_overflow


def _tag_result(
    owner: type[Any],
    name: str,
    tensor_of: Callable[..., torch.Tensor | None],
    category: Category = Category.GRADIENT,
) -> AbstractContextManager[object]:
    """Patch a method to tag a tensor after each call, which ``tensor_of`` selects from the result and the arguments."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        tensor = tensor_of(result, *args)
        if tensor is not None:
            set_category(tensor, category)
        return result

    return mock.patch.object(owner, name, wrapped)


def _tagging(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the method that ends a backward pass to tag ZeRO-1's gradients before and after it.

    They are in ``.grad``, or in ``.grad_accum`` if they accumulate in another dtype. ZeRO-2's are not tagged: they are
    whole until they are copied to the rank's share.
    """

    def tag(optimizer: Any) -> None:
        for group in () if optimizer.partition_gradients else optimizer.bit16_groups:
            for parameter in group:
                gradient = optimizer.get_gradient_for_reduction(parameter)
                if gradient is not None:
                    set_category(gradient, Category.GRADIENT)

    def wrapped(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        tag(optimizer)
        original(optimizer, *args, **kwargs)
        tag(optimizer)

    return wrapped


_TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
}  # fmt: skip


@contextmanager
def accelerator(device: torch.device) -> Iterator[Any]:
    """Yield DeepSpeed's accelerator for a device: that of the CPU, or that of CUDA with the device's own name.

    Within the context, the CUDA accelerator uses the device's module as ``torch.cuda``.
    """
    from deepspeed.accelerator import cuda_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    name = device.type
    if name == "cpu":
        yield CPU_Accelerator()
        return
    methods: dict[str, Any] = {
        "device_name": lambda _, index=None: name if index is None else f"{name}:{index}",
        "device": lambda *_, **__: nullcontext(),
        "current_device_name": lambda _: f"{name}:0",
        "is_fp16_supported": lambda _: True,
        "supported_dtypes": lambda _: [torch.float32, torch.float16, torch.bfloat16],
        "on_accelerator": lambda _, tensor: tensor.device.type == name,
        **dict.fromkeys(_MEMORY_QUERIES, lambda *_, **__: 0),
        **{word: partial(torch.tensor, dtype=dtype, device=name) for word, dtype in _TENSOR_TYPES.items()},
    }
    with mock.patch.object(cuda_accelerator, "torch", SimpleNamespace(cuda=getattr(torch, name))):
        virtual = type("VirtualAccelerator", (cuda_accelerator.CUDA_Accelerator,), methods)()
        virtual._name = name
        yield virtual


# DeepSpeed only reports these, except `available_memory`: if the flattened copy of a rank's weights does not fit,
# ZeRO-1 and ZeRO-2 build it on the host (`stage_1_and_2.py`, `flatten_on_accelerator`). So it never causes an
# out-of-memory error.
_MEMORY_QUERIES = ("memory_cached", "max_memory_cached", "max_memory_reserved", "total_memory", "available_memory")
