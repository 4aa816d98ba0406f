"""Runs DeepSpeed on fake tensors: on the virtual device, without its native operators and without reading values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from autotune.step.distributed.accelerator import accelerator
from autotune.virtual import assume, holds_gradients


@contextmanager
def deepspeed_on(device: torch.device) -> Iterator[None]:
    """Patch DeepSpeed to run under the trace that is running, whose process group exists.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    import deepspeed
    from deepspeed.accelerator import real_accelerator
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import groups

    # The package has attributes of the same names as these modules.
    backend, cpu_adam = (sys.modules[name] for name in ("deepspeed.comm.torch", "deepspeed.ops.adam.cpu_adam"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(real_accelerator, "ds_accelerator", accelerator(device)))
        # Compiled on the spot, for communication over the host's shared memory, which a GPU does not use.
        stack.enter_context(mock.patch.object(backend, "build_shm_op", return_value=None))
        for optimizer in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
            stack.enter_context(mock.patch.object(optimizer, "has_overflow", _finite(optimizer.has_overflow)))
        copied = _noted(DeepSpeedZeroOptimizer.copy_grads_in_partition)
        stack.enter_context(mock.patch.object(DeepSpeedZeroOptimizer, "copy_grads_in_partition", copied))
        stack.enter_context(mock.patch.object(cpu_adam, "CPUAdamBuilder", _Builder))
        stack.enter_context(mock.patch.object(comm, "cdb", None))
        # Keeps process groups for all engines of a process; those of this trace end with it.
        stack.enter_context(mock.patch.dict(vars(groups)))
        deepspeed.init_distributed(dist_backend="fake")
        yield


# The update of DeepSpeedCPUAdam is C++ on addresses, and allocates nothing; the state is allocated in Python.
_ADAM = SimpleNamespace(**dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *_: None))


class _Builder:
    """Loads DeepSpeedCPUAdam's native functions, which do nothing here."""

    def load(self) -> SimpleNamespace:
        return _ADAM


def _finite(look: Callable[..., Any]) -> Callable[..., bool]:
    """Return a method that looks for infinite gradients, and finds none; DeepSpeed would skip the step."""

    def has_overflow(optimizer: Any, *args: Any, **kwargs: Any) -> bool:
        look(optimizer, *args, **kwargs)
        assume("gradients are finite")
        return False

    return has_overflow


def _noted(copy: Callable[..., None]) -> Callable[..., None]:
    """Return a method that also says that the buffer it copies gradients to holds gradients."""

    def copy_grads_in_partition(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        copy(optimizer, *args, **kwargs)
        if optimizer.grads_in_partition is not None:
            holds_gradients(optimizer.grads_in_partition)

    return copy_grads_in_partition
