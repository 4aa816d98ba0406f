"""Operators that run as others do on a GPU, with temporaries of their own, where a dispatch mode sees one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autotune.virtual.known import Knowledge, set_known
from autotune.virtual.tensors import operator_name

_aten = torch.ops.aten
_KEYS = torch._C.DispatchKey
_TRUE = torch.tensor(True)
_ATEN = {
    _aten._safe_softmax.default: _KEYS.CompositeExplicitAutograd,
    _aten.softmax.int: _KEYS.CompositeImplicitAutograd,
    _aten.isinf.default: _KEYS.CompositeExplicitAutograd,
    _aten.to.dtype: _KEYS.CompositeImplicitAutograd,
    _aten.logsumexp.default: _KEYS.CompositeExplicitAutograd,
    _aten.logsumexp.out: _KEYS.CompositeExplicitAutogradNonFunctional,
}
"""Composites on every device, and the key that they are registered with."""


def _int8_vectorwise_quant(knowledge: Knowledge, tensor: torch.Tensor, threshold: float = 0.0) -> tuple[Any, ...]:
    # bitsandbytes/backends/cuda/ops.py. Which columns have outliers depends on values: all of them are taken to have
    # some, which is the most memory that a product may hold, for it keeps a copy of those columns.
    rows, columns = tensor.shape[:-1].numel(), tensor.shape[-1]
    scales = tensor.new_empty(rows, dtype=torch.float32)
    values = tensor.new_empty(tensor.shape, dtype=torch.int8)
    found = None
    if threshold > 0.0:
        outliers = tensor.abs() >= threshold
        some = outliers.any()
        set_known(some, _TRUE)
        # The library's host waits for this value.
        _aten._local_scalar_dense(some)
        knowledge.assume("every column that is multiplied in 8 bits has an outlier, of which a copy is kept")
        outliers.any(dim=0)
        found = torch.arange(columns, device=tensor.device)
    # A kernel of the library.
    values.copy_(tensor)
    if rows > 1 and found is not None:
        values[:, found] = 0
    return values, scales, found


_BITSANDBYTES = frozenset(
    f"bitsandbytes.{name}.default" for name in ("int8_mixed_scaled_mm", "int8_scaled_mm", "int8_vectorwise_dequant")
)
"""bitsandbytes/backends/default/ops.py: composites on GPUs too."""
_OURS = {"bitsandbytes.int8_vectorwise_quant.default": _int8_vectorwise_quant}


@cache
def composite(func: Any) -> Callable[..., Any] | None:
    """Return what runs an operator by others, or None if the device runs it itself.

    It is called with what is known of values, and the operator's arguments.
    """
    if func.namespace != "bitsandbytes":
        key = _ATEN.get(func)
        return None if key is None else _registered(func, key)
    name = operator_name(func)
    return _registered(func, _KEYS.CompositeExplicitAutograd) if name in _BITSANDBYTES else _OURS.get(name)


def _registered(func: Any, key: Any) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: func._op_dk(key, *args, **kwargs)
