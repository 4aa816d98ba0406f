"""Known values: integers and booleans that depend only on shapes and the batch are computed for real.

A training step branches on values: whether a padding mask is all true, how many tokens count, where packed documents
begin. Those are integers and booleans computed from the batch alone, so a small real tensor is kept next to the fake
one and every operator runs on both. Floating-point data is never computed. Where code reads a floating-point value, an
assumption is returned and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autotune.virtual.tensors import tensors_of

# A mask over 4096 x 4096 positions is still computed (16 MiB); larger tensors have no known values.
_LARGEST = 2**24
_SAMPLED = 5
_KNOWN = "_autotune_known"
_STALE = "_autotune_stale"
_CREATORS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("arange", "full", "zeros", "ones", "scalar_tensor", "randperm", "linspace", "eye")
)
_RANDOM = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "native_dropout", "empty_like",
                 "uniform_", "normal_", "random_", "multinomial", "new_empty", "new_empty_strided")
)  # fmt: skip


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the real values of a tensor, or None when they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value: torch.Tensor | None = getattr(tensor, _KNOWN, None)
    return None if value is None or hasattr(value.untyped_storage(), _STALE) else value


def set_known(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Attach real values to a fake tensor, if its type and size are among those that are kept."""
    if _is_kept(value):
        setattr(tensor, _KNOWN, value)


def forget_known(tensor: torch.Tensor) -> None:
    """Drop the real values of a tensor before it is overwritten."""
    tensor.__dict__.pop(_KNOWN, None)


def _known_values(tree: Any) -> Any:
    """Return an argument of an operator, or several, with the values of the tensors in it."""
    if isinstance(tree, torch.Tensor):
        return known(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_known_values(item) for item in tree])
    return tree


def _is_kept(value: torch.Tensor) -> bool:
    count = int(value.numel())
    return count == 1 or (count <= _LARGEST and not value.is_floating_point() and not value.is_complex())


class Knowledge:
    """Computes the known values of an operator's result, and returns assumptions for unknown ones."""

    def __init__(self) -> None:
        self.assumptions: Counter[str] = Counter()

    def compute(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], result: Any) -> Any:
        """Return the operator's real result where all its tensor inputs are known, else None.

        Args:
            inputs: the tensors among the arguments.
            result: the fake result, so that values that would not be kept are not computed; None where the fake result
                is derived from the real one.
        """
        if not inputs and func.overloadpacket not in _CREATORS:
            return None
        wanted = result is None or any(_is_kept(tensor) for tensor in tensors_of(result))
        if not wanted or func.overloadpacket in _RANDOM or any(known(tensor) is None for tensor in inputs):
            if func._schema.is_mutable:
                self._forget(func, args, kwargs)
            return None
        values, words = _known_values(args), {name: _known_values(value) for name, value in kwargs.items()}
        words.pop("pin_memory", None)
        if "device" in words:
            words["device"] = torch.device("cpu")
        with _disable_current_modes(), torch.no_grad():
            if func is torch.ops.aten.histc.default:
                # CUDA has a kernel for integers here, the CPU does not.
                return func(values[0].double(), *values[1:], **words).to(values[0].dtype)
            return func(*values, **words)

    def assume(self, what: str) -> None:
        """Count an assumption under its description."""
        self.assumptions[what] += 1

    def item(self, tensor: torch.Tensor) -> bool | int | float:
        """Return the value of a one-element tensor, or an assumed one where it is not known."""
        value = known(tensor)
        if value is not None:
            with _disable_current_modes():
                return cast(bool | int | float, value.item())
        if tensor.dtype == torch.bool:
            self.assume("a condition on floating-point data is false")
            return False
        if tensor.is_floating_point():
            self.assume("a floating-point value that is read is one")
            return 1.0
        self.assume("an integer that is read is one")
        return 1

    def balance(self, indices: torch.Tensor, choices: int) -> None:
        """Assume that routing is balanced over ``choices`` experts: selection i is expert i mod choices."""
        self.assume("a router spreads its tokens evenly over the experts")
        with _disable_current_modes():
            set_known(indices, (torch.arange(indices.numel()) % choices).view(indices.shape))

    def sample(self, drawn: bool, result: torch.Tensor) -> None:
        """Assume which token is sampled, or that no value is not a number.

        Args:
            drawn: whether the result is a sampled token.
            result: of the operator; its known values are set.
        """
        self.assume("a sampled token does not end its completion" if drawn else "no value is not a number")
        if result.numel() <= _LARGEST:
            with _disable_current_modes():
                set_known(result, torch.full(result.shape, _SAMPLED if drawn else 0, dtype=result.dtype))

    def no_overflow(self, found: torch.Tensor) -> None:
        """Assume that the gradient scaler's check found no infinite gradients."""
        self.assume("scaled gradients are finite")
        with _disable_current_modes():
            set_known(found, torch.zeros(found.shape, dtype=found.dtype))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(given):
                if isinstance(leaf, torch.Tensor) and getattr(leaf, _KNOWN, None) is not None:
                    setattr(getattr(leaf, _KNOWN).untyped_storage(), _STALE, True)
