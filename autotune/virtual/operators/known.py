"""Known values: integers and booleans that depend only on shapes and the batch are computed for real.

A training step branches on values: whether a padding mask is all true, how many tokens the loss counts, where packed
documents begin. These are integers and booleans that depend on the batch alone, so a real tensor is kept with the fake
one, and operators run on both. Floating-point values are not computed, with one exception: batch data such as pixels,
and known integers converted to floating point, are moved, divided and compared, to find padding images and patches. A
read of any other floating-point value returns an assumption, which is counted.

Large values, such as attention masks, are computed lazily, since most are never read: at the first read, or before a
write to a tensor that they are computed from.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from autotune.virtual.recording.tensors import argument, map_tree, mutated_arguments, tensors_of

# Larger tensors have no known values; a mask over 4096 x 4096 positions (16 MiB) has.
_MAX_ELEMENTS = 2**24
# Values with at most this many elements are computed eagerly, which takes no longer than deferring them.
_MAX_EAGER_ELEMENTS = 1024
SAMPLED_TOKEN = 5
"""The token assumed to be sampled: not a special token in any tokenizer known to the author."""
_KNOWN = "_autotune_known"
_STALE = "_autotune_stale"


def _operators(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in names)


_CREATORS = _operators("arange", "full", "zeros", "ones", "scalar_tensor", "randperm", "linspace", "eye")
_RANDOM = _operators(
    "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "native_dropout", "empty_like", "uniform_",
    "normal_", "random_", "multinomial", "new_empty", "new_empty_strided",
)  # fmt: skip

_SKIPPED_PATHS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
"""Path prefixes of PyTorch and of this package, whose frames :func:`_caller` skips."""

# Operators that a model applies to floating-point batch data up to and including the comparison.
_BATCH_DATA_OPERATORS = _operators(
    "_to_copy", "alias", "clone", "detach", "permute", "select", "slice", "squeeze", "transpose", "index", "unsqueeze",
    "view", "_unsafe_view", "split", "split_with_sizes", "cat", "div", "eq", "ne",
)  # fmt: skip


class LazyValue:
    """Values that are computed at the first read.

    Args:
        compute: returns the values.
        reads: ids of the fake storages that they are computed from.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], reads: frozenset[int]) -> None:
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._value: torch.Tensor | None = None
        self.reads = reads

    @property
    def value(self) -> torch.Tensor:
        """The values."""
        if self._compute is not None:
            self._value, self._compute = self._compute(), None
        return cast(torch.Tensor, self._value)

    @property
    def is_pending(self) -> bool:
        """Whether they have not been computed yet."""
        return self._compute is not None


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the real values of a tensor, or None if they are unknown."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value: torch.Tensor | LazyValue | None = getattr(tensor, _KNOWN, None)
    value = value.value if isinstance(value, LazyValue) else value
    return None if value is None or hasattr(value.untyped_storage(), _STALE) else value


def set_known(tensor: torch.Tensor, value: torch.Tensor | LazyValue) -> None:
    """Attach real values to a fake tensor, if :func:`_is_storable` accepts their dtype and size."""
    if isinstance(value, LazyValue) or _is_storable(value):
        setattr(tensor, _KNOWN, value)


def to_list(tensor: Any) -> Any:
    """Return the values of a fake tensor as nested lists; its own ``tolist`` reads each element separately."""
    value = known(tensor)
    if value is None:
        return _fake_tolist(tensor)
    with _disable_current_modes():
        return value.tolist()


_fake_tolist = FakeTensor.tolist


_torch_tensor = torch.tensor
# PyTorch caches the set of functions that obey `with torch.device(…)` at its first use: fill that cache before
# `torch.tensor` is patched.
_device_constructors()


def tensor_from(data: Any, **kwargs: Any) -> torch.Tensor:
    """Like ``torch.tensor``, but supports lists that contain fake tensors."""
    if isinstance(data, (list, tuple)) and (
        fakes := [leaf for leaf in tensors_of(data) if isinstance(leaf, FakeTensor)]
    ):
        kwargs.setdefault("dtype", reduce(torch.promote_types, (tensor.dtype for tensor in fakes)))
        data = map_tree(data, FakeTensor, FakeTensor.tolist)
    return _torch_tensor(data, **kwargs)


def forget_known(tensor: torch.Tensor) -> None:
    """Drop the real values of a tensor before it is overwritten."""
    tensor.__dict__.pop(_KNOWN, None)


def _is_known(tensor: torch.Tensor) -> bool:
    value = getattr(tensor, _KNOWN, None) if isinstance(tensor, FakeTensor) else tensor
    return (isinstance(value, LazyValue) and value.is_pending) or known(tensor) is not None


def _is_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is floating-point batch data with known values."""
    return tensor.is_floating_point() and isinstance(getattr(tensor, _KNOWN, None), LazyValue)


def _makes_data(func: Any, inputs: Sequence[torch.Tensor], result: Any) -> bool:
    """Return whether an operator converts integers or booleans to floating point."""
    is_copy = func is torch.ops.aten._to_copy.default and isinstance(result, FakeTensor)
    return is_copy and result.is_floating_point() and not inputs[0].is_floating_point()


def _attached(tree: Any) -> Any:
    """Return arguments of an operator with tensors replaced by their attached known values, computed or not."""
    return map_tree(tree, FakeTensor, lambda tensor: getattr(tensor, _KNOWN))


def _evaluated(tree: Any) -> Any:
    """Compute the pending values among the arguments that :func:`_attached` returned."""
    return map_tree(tree, LazyValue, lambda later: later.value)


def _run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    values, words = _evaluated((args, kwargs))
    words.pop("pin_memory", None)
    if "device" in words:
        words["device"] = torch.device("cpu")
    with _disable_current_modes(), torch.no_grad():
        if func is torch.ops.aten.histc.default:
            # Only CUDA has an integer kernel.
            return func(values[0].double(), *values[1:], **words).to(values[0].dtype)
        return func(*values, **words)


def _output(func: Any, args: Any, kwargs: Any, place: int) -> Any:
    """Return the result at position ``place`` of an operator with several."""
    return _run_on_values(func, args, kwargs)[place]


def _is_storable(value: torch.Tensor) -> bool:
    count = int(value.numel())
    return count == 1 or (count <= _MAX_ELEMENTS and not value.is_floating_point() and not value.is_complex())


def _caller() -> str:
    """Return the innermost caller outside PyTorch and this package, such as ``(in training_step of trainer.py)``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_PATHS):
        frame = frame.f_back
    return f"(in {frame.f_code.co_name} of {Path(frame.f_code.co_filename).name})" if frame is not None else ""


class Knowledge:
    """Computes the known values of an operator's result, and returns assumptions for unknown ones."""

    def __init__(self) -> None:
        self.assumptions: Counter[str] = Counter()
        self._pending: list[weakref.ref[LazyValue]] = []

    def compute(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], result: Any) -> Any:
        """Return the operator's real result, or :class:`LazyValue`, if all its tensor inputs are known; else None.

        Args:
            inputs: the tensors among the arguments.
            result: the fake result, by which values that would not be kept are skipped; None if the fake result is
                derived from the real one.
        """
        if func is torch.ops.aten.rand.default and result is not None and result.numel() == 1:
            # A module that is dropped at random, as in PEFT's LoHa, is dropped if that is more likely.
            with _disable_current_modes():
                return torch.full(result.shape, 0.5, dtype=result.dtype)
        if not inputs and func.overloadpacket not in _CREATORS:
            return None
        mutable = func._schema.is_mutable
        if mutable and self._pending:
            self._compute_readers({tensor.untyped_storage()._cdata for tensor in _mutated(func, args, kwargs)})
        is_batch_data = func.overloadpacket in _BATCH_DATA_OPERATORS and (
            any(map(_is_data, inputs)) or _makes_data(func, inputs, result)
        )
        wanted = is_batch_data or result is None or any(_is_storable(tensor) for tensor in tensors_of(result))
        if not wanted or func.overloadpacket in _RANDOM or not all(map(_is_known, inputs)):
            if mutable:
                self._forget(func, args, kwargs)
            return None
        values, named = _attached((args, kwargs))
        is_small = not is_batch_data and (not isinstance(result, FakeTensor) or result.numel() <= _MAX_EAGER_ELEMENTS)
        if is_small or mutable or not all(isinstance(tensor, FakeTensor) for tensor in inputs):
            return _run_on_values(func, values, named)
        reads = frozenset(tensor.untyped_storage()._cdata for tensor in inputs)
        reads = reads.union(*(item.reads for item in map(_attached, inputs) if isinstance(item, LazyValue)))
        if not isinstance(result, (list, tuple)):
            return self._lazy_value(lambda: _run_on_values(func, values, named), reads)
        return [self._lazy_value(partial(_output, func, values, named, place), reads) for place in range(len(result))]

    def _lazy_value(self, compute: Callable[[], torch.Tensor], reads: frozenset[int]) -> LazyValue:
        lazy = LazyValue(compute, reads)
        self._pending.append(weakref.ref(lazy))
        return lazy

    def _compute_readers(self, storages: set[int]) -> None:
        """Compute pending values that depend on storages that are about to be overwritten."""
        alive = [lazy for lazy in (item() for item in self._pending) if lazy is not None]
        for lazy in alive:
            if lazy.reads & storages:
                # Reading caches the value, and those of the pending values that it depends on.
                _ = lazy.value
        self._pending = [weakref.ref(lazy) for lazy in alive if lazy.is_pending]

    def assume(self, what: str) -> None:
        """Count an assumption by its description."""
        self.assumptions[what] += 1

    def item(self, tensor: torch.Tensor) -> bool | int | float:
        """Return the value of a one-element tensor, or an assumed one if it is unknown."""
        value = known(tensor)
        if value is not None:
            with _disable_current_modes():
                return cast(bool | int | float, value.item())
        if tensor.dtype == torch.bool:
            self.assume(f"a boolean read from a tensor is False {_caller()}")
            return False
        if tensor.is_floating_point():
            self.assume(f"a float read from a tensor is 1 {_caller()}")
            return 1.0
        self.assume(f"an integer read from a tensor is 1 {_caller()}")
        return 1

    def balance(self, indices: torch.Tensor, choices: int) -> None:
        """Assume at the first read that indices spread evenly over ``choices``: index i is i mod choices."""
        shape = indices.shape

        def spread() -> torch.Tensor:
            self.assume("a router spreads its tokens evenly over the experts")
            with _disable_current_modes():
                return (torch.arange(shape.numel()) % choices).view(shape)

        set_known(indices, self._lazy_value(spread, frozenset()))

    def fill(self, what: str, tensor: torch.Tensor, value: int) -> None:
        """Assume that every element of a tensor equals ``value``, and count the assumption by its description."""
        self.assume(what)
        if tensor.numel() <= _MAX_ELEMENTS:
            with _disable_current_modes():
                set_known(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype))

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in _mutated(func, args, kwargs):
            value = getattr(tensor, _KNOWN, None)
            if value is not None:
                setattr(_evaluated(value).untyped_storage(), _STALE, True)


def _mutated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments that it writes to."""
    return tensors_of([argument(func, args, kwargs, name) for name in mutated_arguments(func)])
