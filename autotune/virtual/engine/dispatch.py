"""The dispatch mode of a trace: runs every operator on fake tensors and records its effect on memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from autotune.core.step_time import Caller
from autotune.virtual.cost.roofline import Kind, Work
from autotune.virtual.operators import memo
from autotune.virtual.operators.accumulation import becomes_gradient, counts_alone, in_place
from autotune.virtual.operators.callers import caller_of
from autotune.virtual.operators.calls import call_of
from autotune.virtual.operators.known import SAMPLED_TOKEN, Knowledge, LazyValue, known, set_known, to_list
from autotune.virtual.operators.stand_ins import KEEPS_OUTLIERS, composite, stand_in_of
from autotune.virtual.operators.work import operator_work
from autotune.virtual.patches.unsupported import UnsupportedError, refuse_unsupported
from autotune.virtual.ranks.collectives import WRAPPERS, received, sent
from autotune.virtual.recording.ledger import Ledger
from autotune.virtual.recording.records import Category, OperatorRecord, Place
from autotune.virtual.recording.streams import current_stream
from autotune.virtual.recording.tensors import argument, operator_name, tensors_of, type_of_device

_aten = torch.ops.aten

Scratch = Callable[[Any, Any, Any, Any], tuple[int, ...]]
"""Returns the sizes in bytes of a kernel's workspaces, given the operator, its positional and named arguments, and its
result."""
InARow = Callable[[Any, Any, Any], int]
"""Returns the number of kernels that the host launches one by one for an operator, given its arguments."""

# Operators with which `generate` selects tokens; the second also has other uses.
_DRAWN = _aten.multinomial, _aten.argmax
# Operators whose result shape depends on values.
_SHAPED_BY_VALUES = frozenset({
    _aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default, _aten.unique_consecutive.default,
    _aten.unique_dim.default, _aten.repeat_interleave.Tensor, _aten.bincount.default, _aten.nonzero_static.default,
})  # fmt: skip
_INDEXES = frozenset({_aten.index.Tensor})
# aten/src/ATen/native/TensorAdvancedIndexing.cpp: a single value is written with masked_fill instead.
_INDEXES_TO_WRITE = frozenset({_aten.index_put, _aten.index_put_, _aten._index_put_impl_})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
# Dispatched more often than all other operators together.
_DEVICE = torch.ops.prim.device.default
_UNKNOWN = "The shape of what {} returns depends on data that a trace does not have."
# aten/src/ATen/native/cuda/Dropout.cu, dropout_cuda: the mask is allocated before the result.
_LAST_FIRST = frozenset({_aten.native_dropout.default})


class UnknownShapeError(UnsupportedError):
    """The shape of a result depends on values that are unknown in a trace."""


class VirtualMode(TorchDispatchMode):
    """Runs operators under the fake tensor mode below it on the stack, and updates the ledger.

    Attributes:
        knowledge: the known values.
    """

    def __init__(self, ledger: Ledger, fake: FakeTensorMode, scratch: Scratch, in_a_row: InARow = lambda *_: 1) -> None:
        super().__init__()
        self.knowledge = Knowledge()
        # The first call runs a backward pass, which must not be traced.
        counts_alone()
        self._ledger = ledger
        self._fake = fake
        self._scratch = scratch
        self._in_a_row = in_a_row
        self._in_backward = False
        self._recomputing_since: int | None = None
        self._failed: Exception | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled while this mode is active."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if not WRAPPERS.isdisjoint(types):
            return NotImplemented
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not self._fake.in_kernel_invocation:
            return args[0].fake_device
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            self._synchronize(func, args[0])
            return self.knowledge.item(args[0])
        if func is _aten.equal.default:
            self._synchronize(func, args[0])
            return self._equal(args[0], args[1])
        if func is _aten.is_pinned.default:
            return self._ledger.is_pinned(args[0])
        try:
            if (composed := composite(func, args)) is not None:
                return self._compose(composed, func, args, kwargs)
            refuse_unsupported(func, args, kwargs)
            self._follow_autograd()
            inputs = tensors_of((args, tuple(kwargs.values())))
            given = received(func, args)
            func, result, values, notes = self._execute(func, args, kwargs, inputs)
            self._keep(func, args, result, values)
            for tensor, value in given:
                set_known(tensor, value)
            self._record(func, args, kwargs, inputs, result, notes, caller_of(func, in_backward=self._in_backward))
            return result
        except Exception as error:  # noqa: BLE001 any error of a backward pass has to leave PyTorch's C++ code
            return self._fail(func, error)

    def _execute(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> tuple[Any, Any, Any, Any]:
        """Return the operator that ran, its result and known values, and the notes of :meth:`_plain`."""
        if func in _SHAPED_BY_VALUES or (func in _INDEXES and _has_mask(args[1])):
            values = self.knowledge.compute(func, args, kwargs, inputs, None)
            return func, self._shaped(func, args, values), values, None
        func, result, notes = self._plain(func, args, kwargs)
        return func, result, self.knowledge.compute(func, args, kwargs, inputs, result), notes

    def _fail(self, func: Any, error: Exception) -> Exception:
        """Raise the error of an operator; if the autograd engine called the operator, end the backward pass instead.

        While C++ unwinds from an exception of Python, PyTorch restores the device by code in Python, which then aborts
        the process (``PythonDeviceGuard`` in ``torch/csrc/acc/Module.cpp``). So the operator returns no tensor, which
        is an error of C++, and :meth:`backward_errors_raised` raises the error.
        """
        if isinstance(error, UnsupportedOperatorException):
            error = UnsupportedError(f"PyTorch cannot derive the shapes of {func}. Use autotune dry-run instead.")
        elif isinstance(error, (DynamicOutputShapeException, DataDependentOutputException)):
            error = UnknownShapeError(_UNKNOWN.format(func))
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            raise error
        self._failed = self._failed or error
        return error

    @contextmanager
    def backward_errors_raised(self) -> Iterator[None]:
        """Raise the error of an operator of a backward pass in place of PyTorch's."""
        try:
            yield
        except RuntimeError:
            if self._failed is None:
                raise
            raise self._failed from None

    def tolist(self, tensor: Any) -> Any:
        """Return the values of a fake tensor as nested lists, and record that the host waits for them."""
        self._synchronize(_aten._to_copy.default, tensor)
        return to_list(tensor)

    def _compose(self, composed: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Run a composite operator through the operators that it consists of."""
        with self:
            result = composed(self.knowledge, *args, **kwargs)
        if operator_name(func) == KEEPS_OUTLIERS and result[1] is not None:
            self._ledger.tag(result[1], Category.OUTLIER)
        return result

    def _plain(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, memo.Notes | None]:
        """Run an operator whose result shape follows from input shapes.

        Returns:
            The operator that ran, its result, and the cached notes for arguments with this metadata.
        """
        if (otherwise := in_place(func, args, kwargs)) is not None:
            return otherwise, *memo.run(otherwise, args, kwargs, self._fake)
        if (stand_in := stand_in_of(func)) is not None:
            with self._fake:
                return func, *memo.run(func, args, kwargs, self._fake, stand_in)
        return func, *memo.run(func, args, kwargs, self._fake)

    def to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake copy of a real host tensor, with the real values as its known values."""
        with self._fake:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        set_known(copy, LazyValue(lambda: tensor, frozenset()) if tensor.is_floating_point() else tensor)
        self._ledger.note(copy)
        return copy

    def _equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        values = known(first), known(second)
        if values[0] is not None and values[1] is not None:
            with _disable_current_modes():
                return bool(torch.equal(*values))
        self.knowledge.assume("two tensors that are compared are equal")
        return True

    def _shaped(self, func: Any, args: Any, values: Any) -> Any:
        if func in _INDEXES:
            # Indexing with a mask equals indexing with the positions where it is true.
            masks = [known(index) if index is not None else None for index in args[1]]
            places = [_expanded(func, index, mask) for index, mask in zip(args[1], masks, strict=True)]
            indices = [self._place(place) for group in places for place in group]
            return func(args[0], indices)
        if values is None:
            raise UnknownShapeError(_UNKNOWN.format(func))
        kept = [self._place(value, args[0].device) for value in tree_leaves(values)]
        return kept[0] if isinstance(values, torch.Tensor) else tuple(kept)

    def _place(self, value: Any, device: torch.device | None = None) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        with self._fake:
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device or value.device)
        set_known(copy, value)
        return copy

    def _keep(self, func: Any, args: Any, result: Any, values: Any) -> None:
        if func is _aten.lift_fresh.default and isinstance(result, FakeTensor):
            # With a constant, the fake tensor mode would call real kernels, which the virtual device lacks.
            result.constant = None
        if values is not None:
            for leaf, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
                if isinstance(leaf, FakeTensor):
                    set_known(leaf, value)
        elif func is _aten.topk.default and args[0].dim():
            dimension = args[2] if len(args) > 2 else -1
            self.knowledge.balance(result[1], args[0].size(dimension))
        elif func.overloadpacket in (_DRAWN if self._ledger.generates else _DRAWN[:1]):
            self.knowledge.fill("a sampled token does not end its completion", result, SAMPLED_TOKEN)
        elif func.overloadpacket is _aten.isnan:
            self.knowledge.fill("no value is NaN", result, 0)
        elif func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            self.knowledge.fill("scaled gradients are finite", args[1], 0)

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        result: Any,
        notes: memo.Notes | None,
        caller: Caller,
    ) -> None:
        inputs = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
        outputs = [tensor for tensor in tensors_of(result) if isinstance(tensor, FakeTensor)]
        every, ledger = inputs + outputs, self._ledger
        for tensor in inputs:
            if getattr(tensor, "_is_param", False) and ledger.is_untagged(tensor):
                ledger.tag(tensor, Category.PARAMETER)
        place = ledger.place(outputs[0]) if outputs else Place.HOST
        kernels = self._in_a_row(func, args, kwargs)
        if kernels > 1:
            self._synchronize(func, inputs[0])
            caller = Caller.LOOP
        pinned = self._pins(func, args, kwargs)
        for tensor in reversed(outputs) if func in _LAST_FIRST else outputs:
            ledger.note(tensor, pinned=pinned)
        if self._in_backward and ledger.keeps_gradients and becomes_gradient(func) and ledger.is_untagged(outputs[0]):
            ledger.tag(outputs[0], Category.GRADIENT)
        ledger.scratch(self._scratch(func, args, kwargs, result), place)
        # The work depends on whether a tensor is passed twice; the metadata key does not contain that.
        if notes is None or len(set(map(id, inputs))) < len(inputs):
            notes = {}
        beside = current_stream().stream_id > 0
        storages = () if func.is_view else ledger.numbers(every)
        since = ledger.recency.since(storages)
        key = ledger.device_type, ledger.times, self._in_backward, caller, kernels, beside, since
        record = notes.get(key)
        if record is None:
            ages = {id(tensor): age for tensor, age in zip(every, since, strict=False) if age is not None}
            work = (
                sent(func, args, kwargs, result, on_side_stream=beside)
                if func.namespace in _COLLECTIVES
                else operator_work(func, args, kwargs, result, device_type=ledger.device_type, since=ages)
            )
            record = notes[key] = OperatorRecord(
                name=operator_name(func),
                shapes=tuple(tuple(tensor.shape) for tensor in every),
                dtypes=tuple(str(tensor.dtype) for tensor in every),
                work=replace(work.part(kernels), times=ledger.times, caller=caller, on_side_stream=beside),
                place=place,
                in_backward=self._in_backward,
                call=call_of(func, args, kwargs, ledger.device_type)
                if work.kind is not Kind.NOTHING and kernels == 1
                else "",
            )
        if place is Place.DEVICE and record.work.kind is Kind.MATMUL:
            ledger.multiplied(in_backward=self._in_backward)
        ledger.ran(record, storages, kernels)
        if _counts_what_it_chooses(func, args, kwargs):
            self._synchronize(func, given[-1])

    def _pins(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator's result on the host is pinned: by its argument, or as the target of a non-blocking copy.

        For the latter, see aten/src/ATen/native/TensorConversions.cpp, ``_to_copy``.
        """
        copies = func is _aten._to_copy.default and kwargs.get("non_blocking")
        return bool(kwargs.get("pin_memory") or (copies and self._ledger.place(args[0]) is Place.DEVICE))

    def _synchronize(self, func: Any, tensor: Any) -> None:
        """Record that the host waits for the device to read a value; nothing if the traced device is the CPU."""
        if isinstance(tensor, FakeTensor) and type_of_device(tensor) == self._ledger.device_type != "cpu":
            work = Work(Kind.SYNCHRONIZE)
            self._ledger.operators.append(OperatorRecord(operator_name(func), ((),), (str(tensor.dtype),), work))

    def _follow_autograd(self) -> None:
        """Tag the storages that the forward pass, or its recomputation, saved for the backward pass."""
        in_backward = torch._C._current_graph_task_id() != -1
        recomputing = in_backward and torch.is_grad_enabled()
        if in_backward and not self._in_backward:
            self._ledger.tag_live(Category.ACTIVATION)
        if recomputing and self._recomputing_since is None:
            self._recomputing_since = self._ledger.next_number
        elif not recomputing and self._recomputing_since is not None:
            self._ledger.tag_live(Category.ACTIVATION, since=self._recomputing_since)
            self._recomputing_since = None
        self._in_backward = in_backward


def _counts_what_it_chooses(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for a kernel that counts the selected elements; False if the count is an argument."""
    if func in _INDEXES or (func.overloadpacket in _INDEXES_TO_WRITE and args[2].numel() > 1):
        return _has_mask(args[1])
    given = (argument(func, args, kwargs, name) for name in ("output_size", "size"))
    return func in _SHAPED_BY_VALUES and all(size is None for size in given)


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _expanded(func: Any, index: torch.Tensor | None, mask: torch.Tensor | None) -> list[torch.Tensor | None]:
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    if mask is None:
        raise UnknownShapeError(f"The mask that {func} chooses by depends on data that a trace does not have.")
    with _disable_current_modes():
        return list(mask.nonzero(as_tuple=True))
