"""Traces a function: runs it on the virtual device and returns its memory events and operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autotune.core.rows.batch_geometry import Recompiled
from autotune.virtual.engine import subprocess_trace
from autotune.virtual.engine.dispatch import VirtualMode
from autotune.virtual.operators.known import tensor_from
from autotune.virtual.patches.libraries import Patches, fake_tensors_accepted, movable_modules
from autotune.virtual.patches.unsupported import errors_explained, refuse_host_only, run_otherwise
from autotune.virtual.ranks import World, as_one_rank
from autotune.virtual.recording.ledger import Ledger
from autotune.virtual.recording.records import Capabilities, Category, Trace, with_peaks
from autotune.virtual.recording.replay import replay
from autotune.virtual.recording.tensors import VIRTUAL, map_tree

Target = Literal["cpu", "cuda"]

_running: list[tuple[VirtualMode, Ledger]] = []
on_real_tensors: Callable[[], AbstractContextManager[None, None]] = _disable_current_modes
"""Returns a context whose body, such as reading data, runs on real tensors and outside the running trace."""


def trace(
    fn: Callable[[torch.device], object],
    *,
    target: Target = "cuda",
    capability: tuple[int, int] = (8, 0),
    others: Iterable[tuple[int, int]] = (),
    world: World | None = None,
) -> Trace:
    """Run ``fn`` on a virtual device with fake tensors, and return its memory events in order.

    ``fn`` gets the device and builds model, optimizer and batch itself. For the target ``cuda``, the first call
    registers the virtual device with PyTorch for the rest of the process, which breaks training on CUDA. So if the
    process has CUDA devices, ``fn`` is pickled and runs in a subprocess without them; its side effects stay there.

    Args:
        fn: any PyTorch code; the body of :func:`phase` becomes a phase of the trace.
        target: ``cpu`` simulates the CPU's allocator and kernels, on the device ``cpu``; ``cuda`` those of a GPU.
        capability: CUDA compute capability of the GPU, by which PyTorch selects kernels.
        others: further compute capabilities; :attr:`Trace.alike` contains those for which the trace is valid too.
        world: the processes of the training, of which one is traced; None for a single process.

    Raises:
        UnknownShapeError: a shape depends on values that are unknown in a trace.
        PicklingError: this process has CUDA devices, and ``fn`` cannot be pickled.
        UnsupportedError: ``fn`` does something that a trace cannot follow, such as training on ``"cuda"`` instead of
            its device.
    """
    gpus = Capabilities(capability, others)
    # The check initialises CUDA only without NVML.
    if target == "cuda" and torch.cuda.device_count():
        return subprocess_trace.in_subprocess(partial(trace, fn, capability=capability, others=gpus.alike, world=world))
    with ExitStack() as stack:
        patches: list[Patches] = []
        kernels: list[Any]
        if target == "cuda":
            # Imported here: defining operators makes PyTorch inspect all loaded modules, which triggers lazy imports.
            from autotune.virtual.engine.device import as_on_cuda, registered
            from autotune.virtual.kernels import cuda

            device, ledger = registered(), Ledger(VIRTUAL)
            kernels = [partial(cuda.scratch, gpus=gpus), partial(cuda.kernels_in_a_row, gpus=gpus)]
            patches.append(as_on_cuda(ledger, gpus))
        else:
            from autotune.virtual.kernels import cpu

            device, ledger, kernels = torch.device("cpu"), Ledger("cpu"), [cpu.scratch]
        fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=target == "cpu")
        fake.cache_enabled = False
        patches += [fake_tensors_accepted(assume), movable_modules(ledger), run_otherwise(assume)]
        patches += [_tagging(ledger), _storages_followed(ledger)]
        if world is not None:
            patches.append(as_one_rank(world, ledger))
        for patch in chain.from_iterable(patches):
            stack.enter_context(patch)
        mode = VirtualMode(ledger, fake, *kernels)
        stack.enter_context(mock.patch.object(torch, "tensor", tensor_from))
        # A lambda, because a bound method as class attribute would not receive the tensor.
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: mode.tolist(tensor)))  # noqa: PLW0108
        stack.enter_context(mock.patch.object(FakeTensor, "numpy", lambda tensor: np.array(mode.tolist(tensor))))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(fake)
        stack.enter_context(mode)
        _running.append((mode, ledger))
        stack.callback(_running.pop)
        with errors_explained(), mode.backward_errors_raised():
            fn(device)
        refuse_host_only(ledger.events)
        found = Trace(
            target=target,
            events=tuple(ledger.events),
            operators=tuple(ledger.operators),
            categories=dict(ledger.categories),
            phases=tuple(ledger.phases),
            assumptions=dict(mode.knowledge.assumptions),
            gradient_final_at=dict(ledger.gradient_final_at),
            kept=dict(ledger.kept),
            alike=frozenset(gpus.alike),
            streams=dict(ledger.streams),
        )
        return with_peaks(found)


def assume(what: str) -> None:
    """Count an assumption in the running trace; without one, do nothing."""
    if _running:
        _running[-1][0].knowledge.assume(what)


def mark_gradient_final(parameter: torch.Tensor) -> None:
    """Record in the running trace that a parameter's gradient is final; usable as a post-accumulate-grad hook."""
    if _running and parameter.grad is not None:
        _running[-1][1].mark_gradient_final(parameter.grad)


def set_category(tensor: torch.Tensor, category: Category) -> None:
    """Set the category, such as gradient, of an engine's own tensor in the running trace."""
    if _running:
        _running[-1][1].tag(tensor, category)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record the body of the context as a phase of the running trace or, without one, as a range of the profiler."""
    with _running[-1][1].phase(name) if _running else torch.profiler.record_function(name):
        yield


def compiled_again_for(other: Recompiled) -> None:
    """Set the untraced micro-batches whose recompilations leak memory, for the running trace."""
    if _running:
        _running[-1][1].again = other


def generating() -> AbstractContextManager[object]:
    """Return a context whose body generates completions in the running trace."""
    return mock.patch.object(_running[-1][1], "generates", True)


def moving_gradients() -> AbstractContextManager[object]:
    """Return a context in which an engine moves each gradient to its own buffer."""
    return mock.patch.object(_running[-1][1], "keeps_gradients", False)


def is_tracing() -> bool:
    """Whether a trace is running."""
    return bool(_running)


def unused_bytes() -> int:
    """Return reserved minus allocated bytes of the caching allocator in the running trace; 0 without one."""
    if not _running:
        return 0
    ledger = _running[-1][1]
    allocator = replay(Trace("cuda", tuple(ledger.events), tuple(ledger.operators), {}, (), streams=ledger.streams))
    return allocator.reserved_bytes - allocator.allocated_bytes


def repeated(times: int) -> AbstractContextManager[object]:
    """Return a context in which the running trace counts the time of operators ``times`` times, memory once."""
    return mock.patch.object(_running[-1][1], "times", times)


def trace_inputs(tree: Any) -> Any:
    """Return ``tree`` with arrays and tensors as host tensors; in a running trace, as fake ones with known values."""
    placed = _running[-1][0].to_fake if _running else torch.clone

    def read(found: Any) -> Any:
        if isinstance(found, FakeTensor):
            return found
        with on_real_tensors():
            real = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
        return placed(real)

    return map_tree(tree, (np.ndarray, torch.Tensor), read)


def _storages_followed(ledger: Ledger) -> Patches:
    """Record resized storages, and give fake tensors and their storages unique addresses.

    FSDP2 frees and allocates gathered parameters by resizing their storages.

    Libraries identify tensors by address. Activation offloading uses the address of a storage and the offset of the
    view, even after the tensor is destroyed (trl/models/activation_offloading.py, _get_unique_tensor_key); accelerate
    maps the address of a parameter to its shard (accelerator.py, _prepare_fsdp2); safetensors detects shared memory.
    """
    resize, real = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        ledger.resized(storage)
        return result

    def of_storage(storage: torch.UntypedStorage) -> int:
        return int(real(storage)) or ledger.address(storage)

    def of_tensor(tensor: FakeTensor) -> int:
        ledger.note(tensor)
        return ledger.address(tensor.untyped_storage()) + int(tensor.storage_offset() * tensor.itemsize)

    yield mock.patch.object(torch.UntypedStorage, "resize_", resized)
    yield mock.patch.object(torch.UntypedStorage, "data_ptr", of_storage)
    yield mock.patch.object(FakeTensor, "data_ptr", of_tensor)


def _tagging(ledger: Ledger) -> Patches:
    """Tag storages with their category: when a module registers them, and before and after optimizer steps."""

    def tag(category: Category) -> Callable[[Any, str, Any], None]:
        def registered(module: Any, name: str, tensor: Any) -> None:
            if isinstance(tensor, torch.Tensor):
                ledger.tag(tensor, category)

        return registered

    yield register_module_parameter_registration_hook(tag(Category.PARAMETER))
    yield register_module_buffer_registration_hook(tag(Category.BUFFER))
    yield register_optimizer_step_pre_hook(partial(_tag_gradients, ledger))
    yield register_optimizer_step_post_hook(partial(_tag_state, ledger))


def _tag_gradients(ledger: Ledger, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Engines bypass the registration hooks of modules for their shards.
            ledger.tag(parameter, Category.PARAMETER)
            if parameter.grad is not None:
                ledger.tag(parameter.grad, Category.GRADIENT)


def _tag_state(ledger: Ledger, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for leaf in tree_leaves(dict(optimizer.state)):
        if isinstance(leaf, torch.Tensor):
            ledger.tag(leaf, Category.OPTIMIZER_STATE)
