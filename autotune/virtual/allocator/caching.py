"""Simulates PyTorch's CUDA caching allocator: allocated and reserved bytes over a sequence of allocations and frees."""

from __future__ import annotations

from autotune.virtual.allocator.blocks import Block, Pool

# Constants of c10/core/AllocatorConfig.h (torch 2.11 to 2.13), each with its name there; the large buffer is the
# default of `large_segment_size_`.
MIN_BLOCK_BYTES = 512  # kMinBlockSize: requests are rounded up to a multiple of it
SMALL_BYTES = 1 << 20  # kSmallSize: the largest request that the small pool serves
SMALL_BUFFER_BYTES = 2 << 20  # kSmallBuffer: segment size of the small pool
LARGE_BUFFER_BYTES = 20 << 20  # large_segment_size(): segment size for large-pool requests under MIN_LARGE_BYTES
MIN_LARGE_BYTES = 10 << 20  # kMinLargeAlloc: the smallest request that gets a segment of its own size
ROUND_LARGE_BYTES = 2 << 20  # kRoundLarge: such a segment is rounded up to a multiple of it

# An expandable segment reserves virtual addresses for 9/8 of the device's memory (`find_expandable_block` in
# c10/cuda/CUDACachingAllocator.cpp). Without a limit, the simulation uses the 48-bit virtual address space.
_UNLIMITED_BYTES = 1 << 48


class OutOfMemoryError(Exception):
    """A request does not fit the device, even after the allocator released its whole cache."""


class CachingAllocator:
    """The caching allocator of one device at its default settings, following c10/cuda/CUDACachingAllocator.cpp.

    Sizes are bytes. ``allocated_bytes`` and ``reserved_bytes`` equal ``torch.cuda.memory_allocated`` and
    ``torch.cuda.memory_reserved``: allocated counts whole blocks, including rounding and remainders too small to split.

    Not simulated: blocks that wait for another stream (``record_stream``), private pools of CUDA graphs,
    ``max_split_size_mb``, ``roundup_power2_divisions`` and ``garbage_collection_threshold``. Each new segment gets a
    higher address than the previous one, as on a fresh device; addresses only order free blocks of the same size.

    Attributes:
        limit_bytes: maximum reserved bytes, or None: the device's memory minus the context and other processes. It
            models the driver's refusal, not ``set_per_process_memory_fraction``; with expandable segments the two
            differ by less than a page.
        expandable_segments: PyTorch's setting of that name.
        allocated_bytes, reserved_bytes: current values.
        peak_allocated_bytes, peak_reserved_bytes: maxima since construction.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        # As on a device, no segment begins at address zero.
        self._next_address = SMALL_BUFFER_BYTES

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate a block of at least ``nbytes`` (positive); release it with :meth:`free`.

        Raises:
            OutOfMemoryError: the limit is exceeded even with an empty cache.
        """
        size = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self._pool(stream, small=size <= SMALL_BYTES)
        start = pool.best_fit(size)
        if start is None:
            start = self._reserve(size, pool)
        if start is None:
            self.empty_cache()
            start = self._reserve(size, pool)
        if start is None:
            raise OutOfMemoryError(
                f"{nbytes} bytes were requested with {self.allocated_bytes} allocated and {self.reserved_bytes} "
                f"reserved of {self.limit_bytes}"
            )
        remainder = pool.free.remove(start) - size
        # should_split: the large pool keeps remainders of up to 1 MiB with the block, unless its segments can expand.
        if remainder > SMALL_BYTES or (remainder >= MIN_BLOCK_BYTES and (pool.small or self.expandable_segments)):
            pool.free.add(start + size, remainder)
        else:
            size += remainder
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return Block(start, size, pool)

    def free(self, block: Block) -> None:
        """Return a block to the cache.

        Raises:
            ValueError: the block has been freed already.
        """
        if not block.allocated:
            raise ValueError(f"the block at {block.address:#x} was freed twice")
        self.allocated_bytes -= block.size
        block.allocated = False
        block.pool.free.add(block.address, block.size)

    def empty_cache(self) -> None:
        """Release every free segment, and every free page of expandable segments, to the device."""
        for pool in self._pools.values():
            self.reserved_bytes -= pool.release()

    def _pool(self, stream: int, *, small: bool) -> Pool:
        found = self._pools.get((stream, small))
        if found is None:
            page_bytes = SMALL_BUFFER_BYTES if small else LARGE_BUFFER_BYTES
            found = Pool(small=small, page_bytes=page_bytes, expandable=self.expandable_segments)
            self._pools[stream, small] = found
        return found

    def _reserve(self, size: int, pool: Pool) -> int | None:
        """Reserve memory; return the start of a free range of at least ``size``, or None at the limit."""
        if self.expandable_segments:
            return self._expand(size, pool)
        if pool.small:
            segment = SMALL_BUFFER_BYTES
        elif size < MIN_LARGE_BYTES:
            segment = LARGE_BUFFER_BYTES
        else:
            segment = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if not self._grow(segment):
            return None
        start = self._add_segment(pool, segment)
        pool.free.add(start, segment)
        return start

    def _expand(self, size: int, pool: Pool) -> int | None:
        start = pool.first_to_grow(size)
        if start is None:
            device = _UNLIMITED_BYTES if self.limit_bytes is None else self.limit_bytes
            span = pool.whole_pages(max(device + device // 8, size))
            start = self._add_segment(pool, span)
            pool.unmapped.add(start, span)
        # Map pages until they cover the request. Mapped pages stay mapped if a later one exceeds the limit.
        while (free := pool.free.sizes.get(start, 0)) < size:
            hole = start + free
            mapped_bytes = pool.whole_pages(min(size - free, pool.unmapped.sizes[hole]))
            if not self._grow(mapped_bytes):
                return None
            pool.map(hole, mapped_bytes)
        return start

    def _add_segment(self, pool: Pool, size: int) -> int:
        """Add a segment at addresses above all others; return its start."""
        start = pool.whole_pages(self._next_address)
        # The gap keeps ranges of neighbouring segments apart.
        self._next_address = start + size + MIN_BLOCK_BYTES
        pool.segments[start] = size
        return start

    def _grow(self, nbytes: int) -> bool:
        reserved = self.reserved_bytes + nbytes
        if self.limit_bytes is not None and reserved > self.limit_bytes:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True
