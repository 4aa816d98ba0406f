"""Floating-point operations of an operator, by PyTorch's own formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# The formulas take the matrices alone; overloads with a type for the result have it among their positional arguments.
_MATRICES = {_aten.mm: 2, _aten.bmm: 2, _aten.addmm: 3, _aten.baddbmm: 3}


def operator_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of one operator; zero for those that PyTorch has no formula for."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    if func.overloadpacket in _MATRICES:
        return int(formula(*args[: _MATRICES[func.overloadpacket]], out_val=result))
    return int(formula(*args, **kwargs, out_val=result))
