"""Classifies dispatched operators by caller, which sets their launch overhead."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.core.step_time import Caller
from autotune.virtual.cost.roofline import Kind
from autotune.virtual.operators.work import operator_work
from autotune.virtual.recording.tensors import operator_name

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_CHECKPOINT = torch.utils.checkpoint.__file__
# Their callers are plain functions of bitsandbytes, without the Python of a module and of its autograd function.
_KERNELS = "optimizer_update", "dequantize_blockwise"
# Depths of frames as seen from `_code`: what calls the mode's handler, and the caller of that.
_ENGINE_AT, _MODE_AT = 3, 4


def caller_of(func: Any, *, in_backward: bool) -> Caller:
    """Return the caller of an operator. Call it directly from ``__torch_dispatch__``: it inspects frames by depth.

    Args:
        func: the operator.
        in_backward: whether autograd's engine runs; a recomputation counts.
    """
    if func.namespace == "bitsandbytes":
        return Caller.KERNEL if any(name in operator_name(func) for name in _KERNELS) else Caller.LIBRARY
    if torch.is_grad_enabled():
        if _hooks(False) is None:
            return Caller.MODULE
        # Selective checkpointing calls operators from its own dispatch mode.
        return Caller.SELECTIVE if _code(_MODE_AT) == ("__torch_dispatch__", _CHECKPOINT) else Caller.HOOKED
    # The engine runs on its own thread, or on that of the call to `backward`.
    engine = in_backward and _code(_ENGINE_AT)[0] in ("", "_engine_run_backward")
    return Caller.ENGINE if engine else Caller.PLAIN


def _code(depth: int) -> tuple[str, str]:
    """Return the function name and the file name of a frame, or empty strings if the stack is shallower."""
    try:
        code = sys._getframe(depth).f_code
    except ValueError:
        return "", ""
    return code.co_name, code.co_filename


class CountedCallers(TorchDispatchMode):
    """Counts the operators with a kernel in code on a real device, by caller.

    Args:
        device_type: type of that device.

    Attributes:
        counts: number of operators by caller.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.counts: Counter[Caller] = Counter()
        self._device_type = device_type

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so PyTorch adds no frame between an operator and its caller."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        caller = caller_of(func, in_backward=torch._C._current_graph_task_id() != -1)
        result = func(*args, **(kwargs or {}))
        kind = operator_work(func, args, kwargs or {}, result, device_type=self._device_type).kind
        if kind not in (Kind.NOTHING, Kind.SYNCHRONIZE):
            self.counts[caller] += 1
        return result
