"""Blocks of the simulated caching allocator, and its lists of free blocks in best-fit order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

# A sort key orders by size, then by address: the size is shifted above the 64 bits of the address.
_ADDRESS_BITS = 64


class Block:
    """A contiguous range of addresses within a segment, linked to its neighbours.

    Attributes:
        address: its start.
        size: in bytes.
        free_list: the free list of its pool and stream.
        previous, next: the neighbours in the segment, or None at its ends.
        allocated: whether it is in use.
        mapped: whether its addresses are backed by memory; False only within expandable segments.
        expandable: whether its segment can grow.
    """

    __slots__ = ("address", "allocated", "expandable", "free_list", "mapped", "next", "previous", "size")

    def __init__(self, address: int, size: int, free_list: FreeList) -> None:
        self.address = address
        self.size = size
        self.free_list = free_list
        self.previous: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.mapped = True
        self.expandable = False

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole segment of fixed size."""
        return self.previous is None and self.next is None and not self.expandable

    @property
    def expandable_size(self) -> int:
        """Its size plus that of the unmapped block after it, if there is one."""
        following = self.next
        return self.size + (following.size if following is not None and not following.mapped else 0)

    def cut(self, size: int) -> Block:
        """Shrink the block to ``size`` and return the remainder, which is in no free list yet."""
        rest = Block(self.address + size, self.size - size, self.free_list)
        rest.mapped, rest.expandable = self.mapped, self.expandable
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def merge_into_cache(self) -> None:
        """Merge the block with its free neighbours in the same mapping state, and return it to the cache."""
        before, after = self.previous, self.next
        if before is not None and not before.allocated and before.mapped is self.mapped:
            self.free_list.remove(before)
            self.address = before.address
            self.size += before.size
            self.previous = before.previous
            if before.previous is not None:
                before.previous.next = self
        if after is not None and not after.allocated and after.mapped is self.mapped:
            self.free_list.remove(after)
            self.size += after.size
            self.next = after.next
            if after.next is not None:
                after.next.previous = self
        self.free_list.add(self)

    def map(self, nbytes: int) -> Block:
        """Map the first ``nbytes`` of an unmapped block; return the merged free block that contains them."""
        self.free_list.remove(self)
        if nbytes < self.size:
            self.free_list.add(self.cut(nbytes))
        self.mapped = True
        self.merge_into_cache()
        return self

    def unmap(self, page_bytes: int) -> int:
        """Unmap the whole pages within a free block; return the number of unmapped bytes."""
        begin = -(-self.address // page_bytes) * page_bytes
        end = (self.address + self.size) // page_bytes * page_bytes
        if begin >= end:
            return 0
        self.free_list.remove(self)
        freed = self
        if begin > self.address:
            freed = self.cut(begin - self.address)
            self.free_list.add(self)
        if end < freed.address + freed.size:
            self.free_list.add(freed.cut(end - freed.address))
        freed.mapped = False
        freed.merge_into_cache()
        return end - begin


class FreeList:
    """The free blocks of one pool on one stream: mapped ones by size, then address; unmapped ones by address.

    Attributes:
        small: whether this is the pool for small requests.
        page_bytes: the granularity by which an expandable segment of this pool grows.
    """

    __slots__ = ("_blocks", "_keys", "_unmapped", "page_bytes", "small")

    def __init__(self, small: bool, page_bytes: int) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._unmapped: list[int] = []

    def add(self, block: Block) -> None:
        """Add a free block."""
        keys, key = self._place(block)
        insort(keys, key)
        self._blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a block that was added."""
        keys, key = self._place(block)
        del keys[bisect_left(keys, key)]
        del self._blocks[key]

    def _place(self, block: Block) -> tuple[list[int], int]:
        """Return the list that a block belongs in, and its key there."""
        if block.mapped:
            return self._keys, block.size << _ADDRESS_BITS | block.address
        return self._unmapped, block.address

    def take_best_fit(self, size: int, *, expandable: bool) -> Block | None:
        """Remove and return the smallest mapped block of at least ``size``, lowest address first, or None.

        With expandable segments, blocks are compared by ``expandable_size``, so the growing end of a segment is used
        last (get_free_block in c10/cuda/CUDACachingAllocator.cpp).
        """
        keys = self._keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        if expandable:
            blocks = self._blocks
            while index + 1 < len(keys):
                if blocks[keys[index + 1]].expandable_size >= blocks[keys[index]].expandable_size:
                    break
                index += 1
        return self._blocks.pop(keys.pop(index))

    def first_expandable(self, size: int) -> Block | None:
        """Return the lowest free or unmapped block that spans ``size`` with its free successors, or None."""
        for address in self._unmapped:
            block = self._blocks[address]
            before = block.previous
            if before is not None and not before.allocated:
                block = before
            room = 0
            at: Block | None = block
            while at is not None and room < size and not at.allocated:
                room += at.size
                at = at.next
            if room >= size:
                return block
        return None

    def add_expandable(self, address: int, span: int) -> Block:
        """Add a new expandable segment, not mapped yet, and return its only block."""
        block = Block(address, span, self)
        block.mapped, block.expandable = False, True
        self.add(block)
        return block

    def whole_pages(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def release(self) -> int:
        """Drop whole free segments and unmap free pages; return the bytes released to the device."""
        released = 0
        for block in list(self.blocks()):
            if block.expandable:
                released += block.unmap(self.page_bytes)
            elif block.is_whole:
                self.remove(block)
                released += block.size
        for address in list(self._unmapped):
            segment = self._blocks[address]
            if segment.previous is None and segment.next is None:
                self.remove(segment)
        return released

    def blocks(self) -> Iterator[Block]:
        """Yield the mapped blocks, the smallest first."""
        return (self._blocks[key] for key in self._keys)
