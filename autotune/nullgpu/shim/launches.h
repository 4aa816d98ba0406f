// Kernel launches: they are counted, and do nothing.
#pragma once
#include "common.h"

namespace nullgpu {

// `function` is the host's stub of a kernel, whose symbol names it, or nullptr.
int launched(const void *function);

// How many blocks of a kernel fit a multiprocessor, by threads and shared memory; registers are not known.
int blocks_per_multiprocessor(int threads, size_t shared);

}  // namespace nullgpu
