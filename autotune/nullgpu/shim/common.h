// What every file of the shim needs: how a function is exported, and the unit of sizes.
#pragma once
#include <cstddef>
#include <cstdint>

// The version script lists the exported names too; everything else stays inside the library.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace nullgpu {

constexpr size_t MIB = size_t(1) << 20;
constexpr int MAX_DEVICES = 16;

inline size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Returns something opaque that free() takes and that a caller may read: stands for any library's handle.
void *new_handle();

}  // namespace nullgpu
