"""PyTorch's database of operators and optimizers as steps: each sample of inputs, forward and backward.

Importing the database changes global settings of PyTorch, so use it in a process of its own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from autotune.virtual import is_tracing, phase, trace, trace_inputs
from autotune.virtual.engine.tracing import Target
from autotune.virtual.recording.records import Place
from tests.virtual.reference import phases_on_cpu

Step = Callable[[torch.device], None]
# No training calls these; of what a null GPU counts, there are none or any number.
_LEFT_OUT = frozenset({"linalg", "fft", "special", "signal", "masked", "sparse", "bincount"})
CAPABILITY = (9, 0)
NUMBER_BYTES = 16
"""Blocks of at most this size are left out: numbers that PyTorch's CPU kernels wrap into tensors, and scalars."""
# The database makes tensors of few elements a side; these are large enough that a tensor is no number.
_SIDES = {"S": (5, 12), "M": (10, 24), "L": (20, 40), "XS": (3, 8)}
_SHAPES = ((300, 70), (70,), (129, 64), (257,), ())


@dataclass(frozen=True)
class _Held:
    """The values of a sample's tensor, to be placed on a device in its order."""

    values: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    trained: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Held:
        shape, stride = tensor.shape, tensor.stride()
        spanned = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        values = tensor.detach().as_strided((spanned,), (1,)).clone()
        return cls(values, shape, stride, tensor.requires_grad)

    def on(self, device: torch.device) -> Tensor:
        if not self.values.is_floating_point():
            flat = trace_inputs(self.values).to(device)
        else:
            flat = torch.empty(self.values.shape, dtype=self.values.dtype, device=device)
            if not is_tracing():
                flat.copy_(self.values)
        return flat.as_strided(self.shape, self.stride).requires_grad_(self.trained)


def _database() -> Any:
    # A package of PyTorch's own tests, of which the database needs one name.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=TestCase))  # type: ignore[arg-type]
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal import common_optimizers, common_utils
    from torch.testing._internal.opinfo import core

    for name, module in list(sys.modules.items()):
        for side, (small, large) in _SIDES.items() if name.startswith("torch.testing._internal") else ():
            if getattr(module, side, None) == small:
                setattr(module, side, large)
    # It would restore the state of the random number generator, which takes memory.
    database.wrapper_set_seed = lambda function, *args, **words: function(*args, **words)
    # For each operator it would look for a test of PyTorch's own in every frame, among all modules that are imported.
    core.extract_test_fn = common_utils.extract_test_fn = lambda: None
    return SimpleNamespace(operators=database.op_db, optimizers=common_optimizers.optim_db)


def steps() -> dict[str, Step]:
    """Return the steps by name: operators with the largest of their first samples, optimizers by implementation."""
    found = _database()
    # Steps that fail leave cycles, which would be freed in the midst of others.
    gc.disable()
    return {**dict(_of_operators(found.operators)), **dict(_of_optimizers(found.optimizers))}


def _of_operators(database: Iterable[Any]) -> Iterator[tuple[str, Step]]:
    for operator in database:
        dtype = next((each for each in (torch.float32, torch.int64) if each in operator.dtypes), None)
        if dtype is None or _LEFT_OUT.intersection(operator.name.split(".")):
            continue
        name = ".".join(filter(None, (operator.name.removeprefix("nn.functional."), operator.variant_test_name)))
        trained = operator.supports_autograd and dtype.is_floating_point
        samples = islice(operator.sample_inputs("cpu", dtype, requires_grad=trained), 3)
        with suppress(RuntimeError, IndexError):  # Some samples are of the sides that the database has.
            given = max(((each.input, each.args, each.kwargs) for each in samples), key=_elements)
            yield name, _forward_and_backward(operator, tree_map(_held, given))


def _elements(tree: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _held(leaf: Any) -> Any:
    return _Held.of(leaf) if isinstance(leaf, Tensor) else leaf


def _placed(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, _Held):
        return leaf.on(device)
    return device if isinstance(leaf, torch.device) else leaf


def _forward_and_backward(operator: Callable[..., Any], held: Any) -> Step:
    def step(device: torch.device) -> None:
        given, args, words = tree_map(lambda leaf: _placed(leaf, device), held)
        made = tree_leaves(operator(given, *args, **words))
        made = [each for each in made if isinstance(each, Tensor) and each.requires_grad]
        if made:
            torch.autograd.backward(made, [torch.ones_like(each) for each in made])

    return step


def _of_optimizers(database: Iterable[Any]) -> Iterator[tuple[str, Step]]:
    for optimizer in database:
        name = optimizer.optim_cls.__name__
        if optimizer.only_supports_sparse_grads:
            continue
        for how in ("default", *{"foreach", "fused"}.intersection(optimizer.supported_impls)):
            for given in optimizer.optim_inputs_func(device="cpu", dtype=torch.float32):
                words = {**given.kwargs, **({} if how == "default" else {how: True})}
                yield f"{name}, {how}, {given.desc}", _updates(optimizer, words)


def _updates(info: Any, words: Mapping[str, Any]) -> Step:
    def step(device: torch.device) -> None:
        shapes = [shape for shape in _SHAPES if len(shape) == 2] if info.optim_cls is torch.optim.Muon else _SHAPES
        parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        optimizer = info.optim_cls(parameters, **words)

        def closure() -> Tensor:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            return torch.ones((), device=device)

        for _ in range(2):
            if info.step_requires_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

    return step


def traced(target: Target = "cpu", every: Mapping[str, Step] | None = None) -> dict[str, int | str]:
    """Return the peak of each step in bytes, or why it was not traced."""
    every, failed = every or steps(), {}

    def run(device: torch.device) -> None:
        torch.empty(1, device=device)
        for name, step in every.items():
            with phase(name):
                failed[name] = _failure(step, device)

    found = trace(run, target=target, capability=CAPABILITY)
    events = ((each.name, found.events[each.first_event : each.end_event]) for each in found.phases)
    return {
        name: failed[name] or _peak(event.change_bytes for event in own if event.place is Place.DEVICE)
        for name, own in events
        if name in every
    }


def both_on_cpu() -> tuple[dict[str, int | str], dict[str, int]]:
    """Return what a trace for the CPU has, and PyTorch's CPU allocator: of the same steps, whose samples take long."""
    every = steps()
    return traced("cpu", every), _on_cpu(every)


def _on_cpu(every: Mapping[str, Step]) -> dict[str, int]:
    """Return the peak of each step in bytes by PyTorch's CPU allocator; without those that fail."""
    failed: dict[str, str] = {}

    def run(device: torch.device) -> None:
        for name, step in every.items():
            with phase(name):
                failed[name] = _failure(step, device)

    phases = phases_on_cpu(run, every.__contains__)
    return {each.name: _peak(change for change, *_ in each.events) for each in phases if not failed[each.name]}


def on_cuda() -> dict[str, int]:
    """Return the peak of each step in bytes that are requested of PyTorch's CUDA allocator; without those that fail."""
    device, found, memory = torch.device("cuda"), {}, torch.cuda.memory
    # cuBLAS's workspaces, one for each thread, are kept from the first product on; a trace does not count them here.
    square = torch.ones(8, 8, device=device, requires_grad=True)
    (square @ square).sum().backward()
    signs = {"alloc": 1, "free_requested": -1}
    for name, step in steps().items():
        memory._record_memory_history(context=None, clear_history=True)
        if not _failure(step, device):
            history = [each for each in memory._snapshot()["device_traces"][0] if each["action"] in signs]
            found[name] = _peak(signs[each["action"]] * each["size"] for each in history)
    return found


def _failure(step: Step, device: torch.device) -> str:
    """Run a step, and return its error, or an empty string."""
    try:
        step(device)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def _peak(changes: Iterable[int]) -> int:
    return max(accumulate(change for change in changes if abs(change) > NUMBER_BYTES), default=0)
