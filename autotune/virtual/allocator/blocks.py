"""Pools of the simulated caching allocator: their segments, and the ranges of addresses in these that are free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

# A sort key orders by size, then by address: the size is shifted above the 64 bits of the address.
_ADDRESS_BITS = 64


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses that was allocated.

    Attributes:
        address: its start.
        size: in bytes.
        pool: the pool of its segment.
        allocated: whether it is in use.
    """

    address: int
    size: int
    pool: Pool
    allocated: bool = True


class Ranges:
    """Disjoint ranges of addresses, each merged with its neighbours.

    Attributes:
        sizes: bytes of each range, by its start.
        starts: the start of each range, by its end.
    """

    __slots__ = ("_keys", "sizes", "starts")

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self._keys: list[int] = []

    def add(self, start: int, size: int) -> None:
        """Add a range, and merge it with the ranges that end at its start and start at its end."""
        if (before := self.starts.get(start)) is not None:
            start, size = before, size + self.remove(before)
        if start + size in self.sizes:
            size += self.remove(start + size)
        self.sizes[start], self.starts[start + size] = size, start
        insort(self._keys, size << _ADDRESS_BITS | start)

    def remove(self, start: int) -> int:
        """Remove a range; return its size."""
        size = self.sizes.pop(start)
        del self.starts[start + size]
        del self._keys[bisect_left(self._keys, size << _ADDRESS_BITS | start)]
        return size

    def at_least(self, size: int) -> Iterator[int]:
        """Yield the starts of the ranges of at least ``size``, the smallest first, the lowest of equals first."""
        for place in range(bisect_left(self._keys, size << _ADDRESS_BITS), len(self._keys)):
            yield self._keys[place] & (1 << _ADDRESS_BITS) - 1


class Pool:
    """The segments of one pool on one stream.

    Attributes:
        small: whether this is the pool for small requests.
        page_bytes: the granularity by which an expandable segment grows.
        expandable: whether its segments can grow: only some of their addresses are backed by memory.
        segments: bytes of addresses of each segment, by its start; there is a gap between two segments.
        free: ranges that are backed by memory and not allocated.
        unmapped: ranges of expandable segments that are not backed by memory.
    """

    __slots__ = ("expandable", "free", "page_bytes", "segments", "small", "unmapped")

    def __init__(self, *, small: bool, page_bytes: int, expandable: bool) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self.expandable = expandable
        self.segments: dict[int, int] = {}
        self.free = Ranges()
        self.unmapped = Ranges()

    def best_fit(self, size: int) -> int | None:
        """Return the start of the smallest free range of at least ``size``, the lowest of equals, or None.

        Ranges of expandable segments are compared together with the unmapped range after each, so the growing end of a
        segment is used last (get_free_block in c10/cuda/CUDACachingAllocator.cpp).
        """
        starts = self.free.at_least(size)
        best = next(starts, None)
        if best is None or not self.expandable:
            return best
        for start in starts:
            if self._size_when_grown(start) >= self._size_when_grown(best):
                break
            best = start
        return best

    def _size_when_grown(self, start: int) -> int:
        size = self.free.sizes[start]
        return size + self.unmapped.sizes.get(start + size, 0)

    def first_to_grow(self, size: int) -> int | None:
        """Return the lowest start of neighbouring free and unmapped ranges that span ``size`` together, or None."""
        for unmapped in sorted(self.unmapped.sizes):
            start = end = self.free.starts.get(unmapped, unmapped)
            while more := self.free.sizes.get(end) or self.unmapped.sizes.get(end):
                end += more
            if end - start >= size:
                return start
        return None

    def map(self, start: int, nbytes: int) -> None:
        """Back the first ``nbytes`` of an unmapped range by memory."""
        rest = self.unmapped.remove(start) - nbytes
        if rest:
            self.unmapped.add(start + nbytes, rest)
        self.free.add(start, nbytes)

    def whole_pages(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def release(self) -> int:
        """Drop free segments of fixed size and unmap free pages; return the bytes released to the device."""
        released = 0
        for start, size in list(self.free.sizes.items()) if self.expandable else ():
            begin, end = self.whole_pages(start), (start + size) // self.page_bytes * self.page_bytes
            if begin < end:
                self.free.remove(start)
                for left, right in ((start, begin), (end, start + size)):
                    if left < right:
                        self.free.add(left, right - left)
                self.unmapped.add(begin, end - begin)
                released += end - begin
        unused = self.unmapped if self.expandable else self.free
        for start, size in list(self.segments.items()):
            if unused.sizes.get(start) == size:
                unused.remove(start)
                del self.segments[start]
                released += 0 if self.expandable else size
        return released
