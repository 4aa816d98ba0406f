"""The simulated caching allocator: examples worked by hand from PyTorch's C++ rules, and invariants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from autotune.units import GIB, KIB, MIB
from autotune.virtual.allocator.blocks import Block
from autotune.virtual.allocator.caching import CachingAllocator, OutOfMemoryError

SIZES = (1, 512, 513, 5 * KIB, 700 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 33 * MIB, 64 * MIB)


def test_every_request_is_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    for nbytes, held in ((1, 512), (512, 512), (513, 1024)):
        before = allocator.allocated_bytes
        allocator.allocate(nbytes)
        assert allocator.allocated_bytes - before == held


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_first_request_reserves_a_segment_of_its_class(nbytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert allocator.reserved_bytes == segment


def test_small_requests_share_a_segment_and_the_next_one_opens_another() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(512 * KIB) for _ in range(4)]
    assert allocator.reserved_bytes == 2 * MIB
    assert [block.address - blocks[0].address for block in blocks] == [0, 512 * KIB, 1024 * KIB, 1536 * KIB]
    allocator.allocate(512)
    assert allocator.reserved_bytes == 4 * MIB


def test_the_large_pool_keeps_a_remainder_of_up_to_one_mebibyte_with_the_block() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(11 * MIB)  # a segment of 12 MiB, of which 1 MiB is left: not more than kSmallSize
    assert block.size == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB
    assert free_ranges(allocator) == []


def test_the_large_pool_splits_off_a_remainder_over_one_mebibyte() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(11 * MIB - 512)
    assert block.size == 11 * MIB - 512
    assert [size for _, size in free_ranges(allocator)] == [MIB + 512]


def test_a_small_request_never_takes_from_the_large_pool() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(512)
    assert allocator.reserved_bytes == 66 * MIB


def test_the_smallest_block_that_fits_is_taken_and_of_equals_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30, 20)]
    for block in blocks:
        allocator.free(block)
    taken = [allocator.allocate(20 * MIB).address for _ in range(3)]
    assert taken == [blocks[1].address, blocks[3].address, blocks[2].address]
    assert allocator.reserved_bytes == 110 * MIB


def test_freed_neighbours_become_one_block_again_whatever_the_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = CachingAllocator()
        blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
        assert allocator.reserved_bytes == 20 * MIB
        for index in order:
            allocator.free(blocks[index])
        assert free_ranges(allocator) == [(min(block.address for block in blocks), 20 * MIB)]


def test_at_the_limit_whole_cached_segments_are_given_back() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    cached = allocator.allocate(60 * MIB)
    allocator.free(cached)
    allocator.allocate(70 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (70 * MIB, 70 * MIB)


def test_a_segment_that_is_partly_used_cannot_be_given_back() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    whole = allocator.allocate(60 * MIB)
    allocator.free(whole)
    allocator.allocate(2 * MIB)  # best fit: the front of the cached 60 MiB
    figures = f"{59 * MIB} bytes .* {2 * MIB} allocated and {60 * MIB} reserved of {100 * MIB}"
    with pytest.raises(OutOfMemoryError, match=figures):
        allocator.allocate(59 * MIB)


def test_after_running_out_the_allocator_goes_on() -> None:
    allocator = CachingAllocator(limit_bytes=32 * MIB)
    kept = allocator.allocate(20 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(GIB)
    allocator.free(kept)
    assert allocator.allocate(30 * MIB).size == 30 * MIB


def test_streams_do_not_share_free_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB, stream=0))
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_an_expandable_segment_grows_by_pages_and_is_used_without_gaps() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(33 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # two pages of 20 MiB
    second = allocator.allocate(30 * MIB)  # 7 MiB are free at the end: 23 MiB are missing, two more pages
    assert (second.address - first.address, allocator.reserved_bytes) == (33 * MIB, 80 * MIB)
    assert allocator.allocated_bytes == 63 * MIB


def test_where_fixed_segments_fragment_an_expandable_one_does_not() -> None:
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable_segments=expandable)
        previous: Block | None = None
        for size in range(100, 400, 20):  # a tensor that grows from batch to batch, freed before the next one
            if previous is not None:
                allocator.free(previous)
            previous = allocator.allocate(size * MIB)
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {False: sum(range(100, 400, 20)) * MIB, True: 380 * MIB}


def test_at_the_limit_free_pages_in_the_middle_of_an_expandable_segment_are_given_back() -> None:
    allocator = CachingAllocator(limit_bytes=120 * MIB, expandable_segments=True)
    front, middle, end = (allocator.allocate(size * MIB) for size in (10, 60, 10))
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(middle)  # 10 to 70 MiB: the pages from 20 to 60 MiB are free as a whole
    large = allocator.allocate(64 * MIB)
    assert allocator.reserved_bytes == 120 * MIB  # two of the four pages, and four new ones at the end
    assert front.address < end.address < large.address


def test_pages_given_back_are_mapped_again_at_the_lowest_address_that_fits() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    _, middle, _ = (allocator.allocate(20 * MIB) for _ in range(3))
    hole = middle.address
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocate(15 * MIB).address == hole
    assert allocator.reserved_bytes == 60 * MIB


def test_a_block_cannot_be_freed_twice() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(512)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(block)


def test_peaks_stay_where_blocks_are_freed() -> None:
    allocator = CachingAllocator()
    _, dropped = allocator.allocate(20 * MIB), allocator.allocate(40 * MIB)
    allocator.free(dropped)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (60 * MIB, 60 * MIB)


@pytest.mark.parametrize("expandable", [False, True], ids=["fixed", "expandable"])
@pytest.mark.parametrize("limit", [None, 300 * MIB], ids=["unlimited", "limited"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_sequence_every_byte_is_accounted_for(seed: int, limit: int | None, expandable: bool) -> None:
    allocator = CachingAllocator(limit, expandable_segments=expandable)
    for live in random_sequence(allocator, random.Random(seed)):
        held = sum(block.size for block in live)
        free = sum(size for _, size in free_ranges(allocator))
        assert allocator.allocated_bytes == held
        assert held + free == allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert held <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
        assert limit is None or allocator.reserved_bytes <= limit
        assert_disjoint(live, allocator)


@pytest.mark.parametrize("expandable", [False, True], ids=["fixed", "expandable"])
@pytest.mark.parametrize("seed", range(6))
def test_once_all_is_freed_everything_can_be_given_back(seed: int, expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    *_, live = random_sequence(allocator, random.Random(seed))
    random.Random(seed + 1).shuffle(live)
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    if not expandable:
        assert free_ranges(allocator) == sorted(
            each for pool in allocator._pools.values() for each in pool.segments.items()
        )
    assert sum(size for _, size in free_ranges(allocator)) == allocator.reserved_bytes
    allocator.empty_cache()
    assert (allocator.reserved_bytes, free_ranges(allocator)) == (0, [])


def test_the_same_sequence_repeated_reserves_nothing_more() -> None:
    allocator = CachingAllocator()
    for _ in range(3):
        *_, live = random_sequence(allocator, random.Random(7))
        for block in live:
            allocator.free(block)
        first = allocator.reserved_bytes
    assert allocator.reserved_bytes == first == allocator.peak_reserved_bytes


def free_ranges(allocator: CachingAllocator) -> list[tuple[int, int]]:
    """Return the ranges that are reserved but free, by address, with their sizes."""
    return sorted(each for pool in allocator._pools.values() for each in pool.free.sizes.items())


def random_sequence(allocator: CachingAllocator, rng: random.Random, events: int = 400) -> Iterator[list[Block]]:
    """Allocate and free at random on two streams, and yield what is held after each event."""
    live: list[Block] = []
    for _ in range(events):
        if live and rng.random() < 0.45:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            try:
                live.append(allocator.allocate(rng.choice(SIZES), stream=rng.randrange(2)))
            except OutOfMemoryError:
                allocator.free(live.pop(rng.randrange(len(live))))
        yield live


def assert_disjoint(live: list[Block], allocator: CachingAllocator) -> None:
    """Fail where two blocks, held or free, share an address."""
    spans = [(block.address, block.size) for block in live]
    spans += free_ranges(allocator)
    spans.sort()
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(spans))
