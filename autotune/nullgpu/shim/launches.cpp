// Kernel launches: they are counted, and do nothing.
#include "launches.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "errors.h"
#include "settings.h"

namespace nullgpu {
namespace {
std::atomic<uint64_t> launches{0};
}

int launched(const void *function) {
    launches++;
    if (settings().trace > 1) {
        Dl_info info;
        bool known = function && dladdr(function, &info) && info.dli_sname;
        fprintf(stderr, "nullgpu: launch %s\n", known ? info.dli_sname : "of a kernel without a name");
    }
    return SUCCESS;
}

int blocks_per_multiprocessor(int threads, size_t shared) {
    int by_threads = device().threads_per_multiprocessor / std::max(threads, 1);
    int by_shared = shared ? int(device().shared_per_multiprocessor / shared) : device().blocks_per_multiprocessor;
    return std::max(1, std::min({by_threads, by_shared, device().blocks_per_multiprocessor}));
}

}  // namespace nullgpu

// For tests: how many kernels this process has launched.
EXPORT uint64_t nullgpu_launches() { return nullgpu::launches; }
