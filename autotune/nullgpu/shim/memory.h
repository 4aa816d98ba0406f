// Device memory: lazily reserved host memory, counted against the card in the table of processes.
#pragma once
#include <mutex>

#include "common.h"

namespace nullgpu {

enum class Kind {
    DEVICE,   // counted in pages of 2 MiB
    HOST,     // pinned memory; not counted
    MANAGED,  // moves between host and device as it is used, so it is not counted; the driver evicts it from a full card
    ADDRESS,  // an address range of virtual memory management, whose physical memory is counted apart
};

struct Range {
    size_t size;
    int device;
    Kind kind;
};

// Functions that return an error return a code of errors.h.
int allocate(void **out, size_t size, Kind kind);
int release(void *pointer);

// Finds the range that holds an address; false: nothing of this library does.
bool find(const void *pointer, Range *range, uintptr_t *start);

// Counts physical memory that has no address yet.
bool take(int device, size_t size);
void give_back(int device, size_t size);

// A copy between host and device is carried out up to NULLGPU_COPY_MAX bytes, one within the host always.
int copy(void *to, const void *from, size_t size);
int copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height);
// Zeros are written at every size: pages that were used are handed back to the kernel, which gives fresh ones as zeros.
int set(void *at, int value, size_t size);
// Lets the content of an address range go.
void forget(void *at, size_t size);

// Memory that no allocation returned, for symbols of kernels that never ran.
void *scratch();

}  // namespace nullgpu
