"""Records the allocations of a real run on the CPU, as the reference for traces with the target ``cpu``."""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

# aten/src/ATen/native/mkldnn/Matmul.cpp: oneDNN computes these in half precision where the processor has instructions
# for it, and borrows memory while it does: nothing with AVX2, the result in float32 with the first AVX-512, and, where
# it has bfloat16, blocks for each thread (1.7 MB at most in products of 120 to 4,096 rows and columns).
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


@dataclass(frozen=True)
class RealPhase:
    """One phase on the real CPU, without what oneDNN borrows within a matrix product: that depends on the processor.

    Attributes:
        peak_bytes: the most bytes that the CPU's allocator had allocated at once.
        events: changes in bytes with the allocated bytes after them, in order.
    """

    name: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    events: tuple[tuple[int, int, str], ...]


def run_on_cpu(
    fn: Callable[[torch.device], object], *, phases: str | tuple[str, ...] = "optimizer step"
) -> dict[str, RealPhase]:
    """Run ``fn`` on the real CPU and return the record of each :func:`~autotune.virtual.engine.tracing.phase`, by name.

    Of phases with the same name, the first is returned.

    Args:
        phases: prefixes of the names of the phases to record.
    """
    found: dict[str, RealPhase] = {}
    for phase in phases_on_cpu(fn, lambda name: name.startswith(phases)):
        found.setdefault(phase.name, phase)
    return found


def phases_on_cpu(fn: Callable[[torch.device], object], wanted: Callable[[str], bool]) -> tuple[RealPhase, ...]:
    """Run ``fn`` on the real CPU and return every phase whose name is ``wanted``, in the order in which they begin."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn(torch.device("cpu"))
        # The profiler would count storages that are freed after it ends as live for the rest of the process.
        gc.collect()
    allocations: list[tuple[int, int, int, str]] = []
    spans: list[tuple[int, int, str]] = []
    stack: list[tuple[Any, str]] = [(event, "") for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while stack:
        event, parent = stack.pop()
        tag, fields = event.typed
        if tag == _EventType.Allocation:
            if fields.device.type == "cpu":
                allocations.append((event.start_time_ns, fields.alloc_size, fields.total_allocated, parent))
        elif wanted(event.name):
            spans.append((event.start_time_ns, event.end_time_ns, event.name))
        stack.extend((child, event.name) for child in event.children)
    allocations.sort(key=lambda item: item[0])
    # The profiler's total starts from what it has recorded earlier in this process.
    zero = allocations[0][2] - allocations[0][1]
    times = [time for time, *_ in allocations]
    found = []
    for start, end, name in sorted(spans):
        first, beyond = bisect_left(times, start), bisect_right(times, end)
        inside = _lasting((size, total - zero, parent) for _, size, total, parent in allocations[first:beyond])
        # A phase may allocate nothing.
        before = allocations[first - 1][2] - zero if first else 0
        levels = [before, *(total for _, total, _ in inside)]
        found.append(RealPhase(name, before, max(levels), levels[-1], tuple(inside)))
    return tuple(found)


def _lasting(events: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return events without blocks that a matrix product allocates and frees before it returns."""
    found: list[tuple[int, int, str]] = []
    for size, total, parent in events:
        if parent in _PRODUCTS and found and (found[-1][0], found[-1][2]) == (-size, parent) and size < 0:
            found.pop()
        else:
            found.append((size, total, parent))
    return found
