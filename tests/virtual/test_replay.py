"""The memory events of a trace in the simulated caching allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.units import MIB
from autotune.virtual.allocator.caching import (
    LARGE_BUFFER_BYTES,
    SMALL_BUFFER_BYTES,
    CachingAllocator,
    OutOfMemoryError,
)
from autotune.virtual.cost.roofline import Kind, Work
from autotune.virtual.recording.records import CUBLAS_WORKSPACE, MemoryEvent, OperatorRecord, Place, Trace
from autotune.virtual.recording.replay import replay, short_of_memory


def traced(changes: list[tuple[int, int, Place]], operators: tuple[OperatorRecord, ...] = ()) -> Trace:
    """Return a trace of changes in bytes: (storage, bytes, place); each allocation is by the operator of its number."""
    events: list[MemoryEvent] = []
    for index, (storage, change, place) in enumerate(changes):
        events.append(MemoryEvent(change, place, storage, index if change > 0 else -1))
        if index < len(operators) and operators[index].work.kind is Kind.MATMUL:
            events.append(MemoryEvent(0, Place.DEVICE, CUBLAS_WORKSPACE, index))
    return Trace("cuda", tuple(events), operators, {}, ())


def operator(kind: Kind, *, in_backward: bool = False) -> OperatorRecord:
    return OperatorRecord("aten.mm.default", (), (), Work(kind), in_backward=in_backward)


def test_blocks_are_rounded_and_come_from_segments() -> None:
    found = replay(traced([(0, 100, Place.DEVICE), (1, 2 * MIB, Place.DEVICE)]))

    assert found.peak_allocated_bytes == 512 + 2 * MIB
    assert found.peak_reserved_bytes == SMALL_BUFFER_BYTES + LARGE_BUFFER_BYTES


def test_what_lies_on_the_host_is_not_the_devices() -> None:
    assert replay(traced([(0, 10 * MIB, Place.HOST)])).peak_allocated_bytes == 0


def test_a_storage_that_grows_is_held_twice_for_a_moment() -> None:
    found = replay(traced([(0, 2 * MIB, Place.DEVICE), (0, 2 * MIB, Place.DEVICE)]))

    assert found.peak_allocated_bytes == 6 * MIB


@pytest.mark.parametrize(
    ("capability", "workspace"), [(None, 8 * MIB + 128 * 1024), ((8, 6), 8 * MIB + 128 * 1024), ((9, 0), 32 * MIB)]
)
def test_each_pass_has_a_workspace_for_its_products(capability: tuple[int, int] | None, workspace: int) -> None:
    forward, backward = operator(Kind.MATMUL), operator(Kind.MATMUL, in_backward=True)
    changes = [(number, MIB, Place.DEVICE) for number in range(3)]

    once = replay(traced(changes, (forward, forward, forward)), capability=capability)
    twice = replay(traced(changes, (forward, backward, backward)), capability=capability)

    assert once.peak_allocated_bytes == 3 * MIB + workspace
    assert twice.peak_allocated_bytes == 3 * MIB + 2 * workspace


def test_a_product_into_a_tensor_that_is_there_has_its_workspace_beside_what_is_freed_next() -> None:
    events = (
        MemoryEvent(64 * MIB, Place.DEVICE, 0, 0),
        MemoryEvent(0, Place.DEVICE, CUBLAS_WORKSPACE, 1),
        MemoryEvent(-64 * MIB, Place.DEVICE, 0),
        MemoryEvent(MIB, Place.DEVICE, 1, 2),
    )
    operators = (operator(Kind.ELEMENTWISE), operator(Kind.MATMUL), operator(Kind.ELEMENTWISE))
    found = replay(replace(traced([], operators), events=events), capability=(9, 0))

    assert found.peak_allocated_bytes == (64 + 32) * MIB


def test_without_products_there_is_no_workspace() -> None:
    assert replay(traced([(0, MIB, Place.DEVICE)], (operator(Kind.ELEMENTWISE),))).peak_allocated_bytes == MIB


def test_a_limit_that_does_not_hold_it_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError):
        replay(traced([(0, 64 * MIB, Place.DEVICE)]), limit_bytes=32 * MIB)


@pytest.mark.parametrize(("emptied", "reserved"), [(False, 70 * MIB), (True, 40 * MIB)])
def test_an_emptied_cache_is_not_reserved_in_the_backward_pass(emptied: bool, reserved: int) -> None:
    forward, backward = operator(Kind.ELEMENTWISE), operator(Kind.ELEMENTWISE, in_backward=True)
    changes = [(0, 30 * MIB, Place.DEVICE), (0, -30 * MIB, Place.DEVICE), (2, 40 * MIB, Place.DEVICE)]

    found = replay(traced(changes, (forward, forward, backward)), emptied=emptied)

    assert found.peak_allocated_bytes == 40 * MIB
    assert found.peak_reserved_bytes == reserved


def test_a_cache_is_emptied_before_each_backward_pass_and_not_within_one() -> None:
    forward, backward = operator(Kind.ELEMENTWISE), operator(Kind.ELEMENTWISE, in_backward=True)
    once = [(0, 30 * MIB, Place.DEVICE), (0, -30 * MIB, Place.DEVICE), (2, 40 * MIB, Place.DEVICE)]
    again = [(2, -40 * MIB, Place.DEVICE), (4, 50 * MIB, Place.DEVICE)]

    within = replay(traced([*once, *again], (*(forward,) * 2, *(backward,) * 3)), emptied=True)
    between = replay(
        traced([*once, *again, (4, -50 * MIB, Place.DEVICE), (6, MIB, Place.DEVICE), (7, 60 * MIB, Place.DEVICE)],
               (*(forward,) * 2, *(backward,) * 4, forward, backward)),
        emptied=True,
    )  # fmt: skip

    assert within.peak_reserved_bytes == 90 * MIB
    assert between.peak_reserved_bytes == 90 * MIB + SMALL_BUFFER_BYTES


def test_what_is_freed_on_one_stream_is_not_used_on_another() -> None:
    changes = [(0, 20 * MIB, Place.DEVICE), (0, -20 * MIB, Place.DEVICE), (1, 20 * MIB, Place.DEVICE)]
    alike = traced(changes)
    apart = replace(alike, streams={0: 1})

    assert replay(alike).peak_reserved_bytes == 20 * MIB
    assert replay(apart).peak_reserved_bytes == 40 * MIB
    assert replay(apart).peak_allocated_bytes == 20 * MIB


def short(trace: Trace) -> int:
    """Return the bytes that a trace reserves on a device that is short of memory."""

    def run(limit_bytes: int) -> CachingAllocator:
        return replay(trace, limit_bytes=limit_bytes)

    return short_of_memory(replay(trace), run).peak_reserved_bytes


def test_an_allocator_returns_its_cache_to_a_device_that_is_short_of_memory() -> None:
    sizes = {number: 20 * (number + 1) * MIB for number in range(3)}
    one_by_one = traced([(number, sign * size, Place.DEVICE) for number, size in sizes.items() for sign in (1, -1)])

    assert replay(one_by_one).peak_reserved_bytes == (20 + 40 + 60) * MIB
    assert short(one_by_one) == 60 * MIB


def test_an_allocator_cannot_return_a_segment_that_has_a_tensor_in_it() -> None:
    # A tensor at the start of the segment keeps it, and the next one does not fit into the rest.
    changes = [(0, 40 * MIB), (0, -40 * MIB), (1, 2 * MIB), (2, 40 * MIB)]
    kept = traced([(number, size, Place.DEVICE) for number, size in changes])

    assert replay(kept).peak_allocated_bytes == 42 * MIB
    assert replay(kept).peak_reserved_bytes == short(kept) == 80 * MIB


def test_what_is_unused_is_reserved_less_allocated() -> None:
    on_one = traced([(0, 3 * MIB, Place.DEVICE), (1, 5 * MIB, Place.DEVICE), (0, -3 * MIB, Place.DEVICE)])
    found = [replay(replace(on_one, streams=streams)) for streams in ({}, {1: 7})]
    assert [each.reserved_bytes - each.allocated_bytes for each in found] == [15 * MIB, 35 * MIB]
