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
from autotune.virtual.costs import Kind
from autotune.virtual.tensors import operator_name
from autotune.virtual.work import operator_work

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_CHECKPOINT = torch.utils.checkpoint.__file__
# Frames between an operator's caller and the functions below: this module's, the mode's handler, and what calls it.
_ENGINE_AT, _MODE_AT = 3, 4


def caller_of(func: Any, *, in_backward: bool) -> Caller:
    """Return the caller; the dispatch mode's handler calls this itself.

    Args:
        func: the operator.
        in_backward: whether autograd's engine runs, which a recomputation is part of.
    """
    if func.namespace == "bitsandbytes":
        return Caller.UPDATE if "optimizer_update" in operator_name(func) else Caller.LIBRARY
    if torch.is_grad_enabled():
        if _hooks(False) is None:
            return Caller.MODULE
        # Its mode runs operators itself.
        return Caller.SELECTIVE if _code(_MODE_AT) == ("__torch_dispatch__", _CHECKPOINT) else Caller.HOOKED
    # The engine runs in a thread of its own, or below what started it.
    engine = in_backward and _code(_ENGINE_AT)[0] in ("", "_engine_run_backward")
    return Caller.ENGINE if engine else Caller.PLAIN


def _code(depth: int) -> tuple[str, str]:
    """Return the names of the function and of the file of a frame, or empty ones if there is no such frame."""
    try:
        code = sys._getframe(depth).f_code
    except ValueError:
        return "", ""
    return code.co_name, code.co_filename


class CountedCallers(TorchDispatchMode):
    """Counts the operators of real code that have a kernel, by who has the host launch them.

    Args:
        device_type: of the device that they run on.

    Attributes:
        counts: the number of operators of each caller.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.counts: Counter[Caller] = Counter()
        self._device_type = device_type

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that no further frame is between an operator and its caller."""
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
