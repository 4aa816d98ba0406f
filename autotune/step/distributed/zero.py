"""Runs DeepSpeed on fake tensors: on the virtual device, without its native operators and without reading values."""

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
from autotune.virtual import UnsupportedError, assume, holds, is_tracing
from autotune.virtual.records import Category
from autotune.virtual.tracing import moving_gradients


@contextmanager
def engine_on(device: torch.device, plan: TrainingPlan) -> Iterator[None]:
    """Patch DeepSpeed, where it trains a plan, to run under the trace that is running, whose process group exists.

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
        # Compiled on the spot, for communication over the host's shared memory, which a GPU does not use.
        mock.patch.object(backend, "build_shm_op", return_value=None),
        mock.patch.object(Zero2, "has_overflow", _finite(Zero2.has_overflow)),
        mock.patch.object(Zero3, "has_overflow", _finite(Zero3.has_overflow)),
        # ZeRO-2's buffer that gradients are copied to; a rank's share in float32, which takes its place where
        # `data_types.grad_accum_dtype` is wider than the model's type; and ZeRO-3's share, and weights.
        _leaving(Zero2, "copy_grads_in_partition", lambda _, optimizer, *__: optimizer.grads_in_partition),
        _leaving(Zero2, "_build_compact_grad_partition_buffer", lambda buffers, *_: buffers.flat_partition),
        _leaving(Zero3, "_setup_for_real_optimizer", lambda _, optimizer: optimizer.grad_partitions_flat_buffer),
        _leaving(Init, "_partition_param", lambda _, __, parameter, *___: parameter.ds_tensor, Category.PARAMETER),
        mock.patch.object(Zero2, "backward_epilogue", _tagging(Zero2.backward_epilogue)),
        mock.patch.object(
            Zero2, "independent_gradient_partition_epilogue", _tagging(Zero2.independent_gradient_partition_epilogue)
        ),
        mock.patch.object(cpu_adam, "CPUAdamBuilder", _Builder),
        mock.patch.object(fused_adam, "FusedAdamBuilder", _Builder),
        # Others would be compiled on the spot, for this machine, and take no fake tensors.
        mock.patch.object(OpBuilder, "jit_load", _refused),
        mock.patch.object(NotImplementedBuilder, "load", _refused),
        mock.patch.object(comm, "cdb", None),
        # Keeps process groups for all engines of a process; those of this trace end with it.
        mock.patch.dict(vars(groups)),
        # `with_shares_of` scales all bytes of gradients to the whole model's, and of those of ZeRO-2 only the
        # buffer grows with it: a whole gradient is there for the moment until it is copied.
        moving_gradients() if zero_stage(plan) == 2 else nullcontext(),
    ):
        deepspeed.init_distributed(dist_backend="fake")
        yield


def gradients_of_ranks(plan: TrainingPlan, accelerator: Any) -> tuple[int, ...]:
    """Return how many elements of gradients each rank of ZeRO-2 holds between micro-batches, by DeepSpeed's partition.

    Each holds every tensor whole that its share has a part of (``stage_1_and_2.py``, ``copy_grads_in_partition``).

    Args:
        accelerator: of the training on any rank: DeepSpeed's optimizer has the partition of all.

    Returns:
        Nothing where all ranks hold the same, or hold it on the host.
    """
    if zero_stage(plan) != 2:
        return ()
    optimizer = accelerator.deepspeed_engine_wrapped.engine.optimizer
    if not getattr(optimizer, "partition_gradients", False) or optimizer.cpu_offload:
        return ()
    held = [0] * plan.launch.processes
    for group, parts in optimizer.param_to_partition_ids.items():
        if optimizer._use_compact_grad_partition_buffer(group):
            continue
        for parameter, holders in parts.items():
            for rank in holders:
                held[rank] += optimizer.param_dict[parameter].numel()
    return tuple(held)


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "Of DeepSpeed's native operators only Adam's are traced, and none for offload to nvme, quantised communication "
        "(zero_quantized_weights, zero_quantized_gradients) or another optimizer of its own."
    )


def _updated(
    _chunk: int, _skipped: Any, tensors: Any, lr: float, beta1: float, beta2: float, eps: float, *_: Any
) -> None:
    """Update in place by PyTorch's own fused kernel, which reads and writes the same tensors as DeepSpeed's."""
    gradients, weights, means, squares = tensors
    steps = [means[0].new_ones((), dtype=torch.float32)] * len(weights)
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": 0.0}
    torch._fused_adamw_(weights, gradients, means, squares, [], steps, **numbers, amsgrad=False, maximize=False)


# The update of DeepSpeedCPUAdam is C++ on addresses, and allocates nothing; the state is allocated in Python.
_ADAM = SimpleNamespace(
    **dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *_: None), multi_tensor_adam=_updated
)


class _Builder:
    """Loads the native functions of DeepSpeed's Adam: on the host they do nothing here."""

    def load(self) -> SimpleNamespace:
        return _ADAM


def _finite(look: Callable[..., Any]) -> Callable[..., bool]:
    """Return a method that looks for infinite gradients, and finds none; DeepSpeed would skip the step."""

    def has_overflow(optimizer: Any, *args: Any, **kwargs: Any) -> bool:
        look(optimizer, *args, **kwargs)
        assume("gradients are finite")
        return False

    return has_overflow


def _leaving(
    owner: type[Any],
    name: str,
    left: Callable[..., torch.Tensor | None],
    category: Category = Category.GRADIENT,
) -> AbstractContextManager[object]:
    """Patch a method to tag a tensor that is there at its end: ``left`` returns it, given the result and arguments."""
    method = getattr(owner, name)

    def leaving(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        tensor = left(result, *args)
        if tensor is not None:
            holds(tensor, category)
        return result

    return mock.patch.object(owner, name, leaving)


def _tagging(end: Callable[..., None]) -> Callable[..., None]:
    """Return a method that ends a backward pass, and tags what ZeRO-1 has of gradients before and after.

    They are in ``.grad``, or in ``.grad_accum`` if they are added up in another type. Those of ZeRO-2 are whole until
    they are copied, and no share of a rank.
    """

    def tag(optimizer: Any) -> None:
        for group in () if optimizer.partition_gradients else optimizer.bit16_groups:
            for parameter in group:
                gradient = optimizer.get_gradient_for_reduction(parameter)
                if gradient is not None:
                    holds(gradient, Category.GRADIENT)

    def tagged(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        tag(optimizer)
        end(optimizer, *args, **kwargs)
        tag(optimizer)

    return tagged


_TYPES = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
}  # fmt: skip


@contextmanager
def accelerator(device: torch.device) -> Iterator[Any]:
    """Yield an accelerator of DeepSpeed for a device: its own one for the CPU, else its one for CUDA.

    Within the context, what that takes for ``torch.cuda`` is the module of the device.
    """
    from deepspeed.accelerator import cuda_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    name = device.type
    if name == "cpu":
        yield CPU_Accelerator()
        return
    answers: dict[str, Any] = {
        "device_name": lambda _, index=None: name if index is None else f"{name}:{index}",
        "device": lambda *_, **__: nullcontext(),
        "current_device_name": lambda _: f"{name}:0",
        "is_fp16_supported": lambda _: True,
        "supported_dtypes": lambda _: [torch.float32, torch.float16, torch.bfloat16],
        "on_accelerator": lambda _, tensor: tensor.device.type == name,
        **dict.fromkeys(_MEMORY_FIGURES, lambda *_, **__: 0),
        **{word: partial(torch.tensor, dtype=dtype, device=name) for word, dtype in _TYPES.items()},
    }
    with mock.patch.object(cuda_accelerator, "torch", SimpleNamespace(cuda=getattr(torch, name))):
        found = type("VirtualAccelerator", (cuda_accelerator.CUDA_Accelerator,), answers)()
        found._name = name
        yield found


# Reported only, but for `available_memory`: where the copy of a rank's weights in one piece does not fit, ZeRO-1 and
# ZeRO-2 make it on the host (`stage_1_and_2.py`, `flatten_on_accelerator`), so that it is never what does not fit.
_MEMORY_FIGURES = ("memory_cached", "max_memory_cached", "max_memory_reserved", "total_memory", "available_memory")
