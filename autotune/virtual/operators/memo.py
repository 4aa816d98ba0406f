"""Caches result metadata by operator and argument metadata, so that a fake kernel runs once per combination.

The fake tensor mode also has a cache, but building its keys takes most of its time. This one covers only simple cases:
operators that return nothing, one of their arguments, new tensors, or views of an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autotune.virtual.recording.tensors import tensors_of

_aten = torch.ops.aten
_CONSTANT_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_NUMBERS = (int, float, type(None))
# Operators that change the size or storage of their first argument, or that wrap an existing tensor.
_RESIZES = frozenset({_aten.resize_, _aten.resize_as_, _aten.set_, _aten.lift, _aten.lift_fresh, _aten.lift_fresh_copy})
# Operators whose result shares the storage of an argument, which their schema does not show.
_UNDECLARED_VIEWS = frozenset({_aten._unsafe_view})


def _new_fake(meta: torch.Tensor, device: torch.device, fake: FakeTensorMode) -> FakeTensor:
    """Return ``FakeTensor(fake, meta, device)``; faster, since attributes are copied from an earlier one."""
    attributes = _attributes.get(device)
    if attributes is None:
        first = FakeTensor(fake, meta, device)
        _attributes[device] = {name: value for name, value in first.__dict__.items() if value is not fake}
        return first
    tensor = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
    tensor.__dict__.update(attributes)
    tensor.fake_mode = fake
    return tensor


_attributes: dict[torch.device, dict[str, Any]] = {}
"""The attributes of a new fake tensor, except its mode, by device."""


_Rule = Callable[[Any, Any, FakeTensorMode], Any]
"""Recreates the result of an operator from its positional and named arguments and the fake tensor mode."""
Notes = dict[Any, Any]
"""A caller's cache of values that depend on the metadata of an operator's arguments alone, such as its work."""
_cache: dict[Any, tuple[_Rule, Notes]] = {}
"""By operator and argument metadata."""


class _UncacheableError(Exception):
    pass


def run(
    func: Any, args: Any, kwargs: Any, fake: FakeTensorMode, kernel: Callable[..., Any] | None = None
) -> tuple[Any, Notes | None]:
    """Run an operator on fake tensors, under the fake tensor mode that is on the stack.

    Args:
        kernel: replaces the operator, if given; its result must depend on the metadata of its arguments alone.

    Returns:
        Its result, and the notes for arguments with this metadata; None if the call is not one of the simple cases.
    """
    try:
        key = (func, torch.get_default_dtype(), *_metadata(args, kwargs))
    except _UncacheableError:
        return (kernel or func)(*args, **kwargs), None
    cached = _cache.get(key)
    if cached is not None:
        return cached[0](args, kwargs, fake), cached[1]
    result = (kernel or func)(*args, **kwargs)
    rule = _rule(func, args, kwargs, result)
    # An operator may resize a tensor that it writes to.
    if rule is None or _metadata(args, kwargs) != key[2:]:
        return result, None
    cached = _cache[key] = rule, {}
    return result, cached[1]


def _metadata(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _key_of(args), tuple([(name, _key_of(value)) for name, value in kwargs.items()])


def _key_of(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _UncacheableError
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, (tuple, list)):
        return tuple([_key_of(item) for item in value])
    if isinstance(value, _CONSTANT_TYPES):
        # 1, 1.0 and True are equal, but produce results of different dtypes.
        return type(value), value
    raise _UncacheableError


def _rule(func: Any, args: Any, kwargs: Any, result: Any) -> _Rule | None:
    """Return the rule that recreates a result, or None if it is not one of the simple cases."""
    if torch.Tag.inplace_view in func.tags or func.overloadpacket in _RESIZES:
        return None
    if result is None:
        return _constant_rule(None)
    given = _argument_rule(args, kwargs, result)
    if given is not None:
        return given
    if func._schema.is_mutable:
        return None
    results = [result] if isinstance(result, torch.Tensor) else result
    if type(results) not in (tuple, list) or not all(isinstance(item, (FakeTensor, *_NUMBERS)) for item in results):
        return None
    is_view = func.is_view or func.overloadpacket in _UNDECLARED_VIEWS
    found = [_view_rule(output, args) for output in results] if is_view else _new_tensor_rules(results, (args, kwargs))
    rules = [rule for rule in found if rule is not None]
    if len(rules) < len(found) or not any(isinstance(output, FakeTensor) for output in results):
        return None
    if isinstance(result, torch.Tensor):
        return rules[0]
    kind = type(result)
    return lambda *given: kind(rule(*given) for rule in rules)


def _constant_rule(value: Any) -> _Rule:
    """Return the rule of a result that is a number or None."""
    return lambda *_: value


def _argument_rule(args: Any, kwargs: Any, result: Any) -> _Rule | None:
    """Return the rule of a result that is one of the arguments, positional or named; else None."""
    places = (*enumerate(args), *kwargs.items()) if isinstance(result, FakeTensor) else ()
    place = next((place for place, value in places if value is result), None)
    return None if place is None else lambda args, kwargs, _: (args if isinstance(place, int) else kwargs)[place]


def _view_rule(tensor: Any, args: Any) -> _Rule | None:
    """Return the rule of a view of a positional argument."""
    if not isinstance(tensor, FakeTensor):
        return None
    storage = tensor.untyped_storage()._cdata
    for position, given in enumerate(args):
        if isinstance(given, FakeTensor) and given.untyped_storage()._cdata == storage:
            return _tensor_rule(tensor, position)
    return None


def _new_tensor_rules(results: Sequence[Any], arguments: tuple[Any, Any]) -> list[_Rule | None]:
    """Return the rules of results whose tensors each span a storage of their own; None for any other."""
    args, kwargs = arguments
    used = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, tuple(kwargs.values())))}
    rules: list[_Rule | None] = []
    for tensor in results:
        if not isinstance(tensor, FakeTensor):
            rules.append(_constant_rule(tensor))
            continue
        storage = tensor.untyped_storage()
        rule = _tensor_rule(tensor, None) if storage._cdata not in used and not tensor.storage_offset() else None
        if rule is not None and rule((), {}, tensor.fake_mode).untyped_storage().nbytes() != storage.nbytes():
            rule = None
        rules.append(rule)
        used.add(storage._cdata)
    return rules


def _tensor_rule(tensor: FakeTensor, view_of: int | None) -> _Rule | None:
    """Return the rule of a tensor that spans its own new storage, or of a view.

    Args:
        view_of: the position of the viewed argument, or None.
    """
    if tensor.constant is not None or tensor.dtype.is_complex:
        return None
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    dtype, device = tensor.dtype, tensor.fake_device

    def make(args: Any, _kwargs: Any, fake: FakeTensorMode) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            if view_of is None:
                made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                # `torch.empty` would cast to the dtype of the weights while a model is built under ZeRO-3
                # (deepspeed/runtime/zero/partition_parameters.py, ``_add_tensor_creation_wrappers``).
                made = torch.empty_strided((0,), (1,), dtype=dtype, device="meta")
                made.set_(args[view_of].untyped_storage(), offset, shape, stride)
            return _new_fake(made, device, fake)

    return make
