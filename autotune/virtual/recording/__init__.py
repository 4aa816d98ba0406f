"""Events of a trace: operators, allocations and frees in order; and their replay through the allocator."""
