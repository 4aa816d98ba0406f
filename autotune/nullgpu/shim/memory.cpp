// Device memory: lazily reserved host memory, counted against the card in the table of processes.
#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "devices.h"
#include "errors.h"
#include "processes.h"
#include "settings.h"

namespace nullgpu {
namespace {

// The driver hands out memory in pages of 2 MiB.
constexpr size_t PAGE = 2 * MIB, HOST_PAGE = 4096;

std::mutex mutex;
std::map<uintptr_t, Range> ranges;
using Guard = std::lock_guard<std::mutex>;

const Range *found(const void *pointer, uintptr_t *start) {
    auto at = reinterpret_cast<uintptr_t>(pointer);
    auto after = ranges.upper_bound(at);
    if (after == ranges.begin()) return nullptr;
    auto it = std::prev(after);
    if (at >= it->first + it->second.size) return nullptr;
    if (start) *start = it->first;
    return &it->second;
}

bool on_device(const void *pointer) {
    Guard guard(mutex);
    const Range *range = found(pointer, nullptr);
    return range && range->kind != Kind::HOST;
}

// Reserves addresses, 2 MiB aligned as the driver's are. The kernel gives pages when they are first written to.
void *reserve(size_t size) {
    size_t wanted = round_up(size, HOST_PAGE), room = wanted + PAGE;
    void *at = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    uintptr_t begin = reinterpret_cast<uintptr_t>(at), aligned = round_up(begin, PAGE);
    uintptr_t stop = aligned + wanted, end = begin + room;
    if (aligned > begin) munmap(at, aligned - begin);
    if (end > stop) munmap(reinterpret_cast<void *>(stop), end - stop);
    // A write of one number would otherwise cost 2 MiB.
    madvise(reinterpret_cast<void *>(aligned), wanted, MADV_NOHUGEPAGE);
    return reinterpret_cast<void *>(aligned);
}

}  // namespace

bool take(int device, size_t size) {
    return start_context(device) && hold(card_of(device), size, nullgpu::device().total);
}
void give_back(int device, size_t size) { let_go(card_of(device), size); }

int allocate(void **out, size_t size, Kind kind) {
    if (!initialise()) return fail(NOT_INITIALISED);
    if (!visible_count()) return fail(NO_DEVICE);
    *out = nullptr;
    if (!size) return SUCCESS;
    int device = current_device();
    size_t counted = kind == Kind::DEVICE ? round_up(size, PAGE) : 0;
    if (counted && !take(device, counted)) {
        if (settings().trace) fprintf(stderr, "nullgpu: cudaMalloc %zu refused\n", size);
        return fail(OUT_OF_MEMORY);
    }
    *out = reserve(size);
    if (!*out) {
        if (counted) give_back(device, counted);
        return fail(OUT_OF_MEMORY);
    }
    if (settings().trace && counted) fprintf(stderr, "nullgpu: cudaMalloc %zu at %p\n", size, *out);
    Guard guard(mutex);
    ranges[reinterpret_cast<uintptr_t>(*out)] = {size, device, kind};
    return SUCCESS;
}

int release(void *pointer) {
    if (!pointer) {
        // cudaFree(nullptr) is how programs make the context.
        if (!initialise()) return fail(NOT_INITIALISED);
        if (!visible_count()) return fail(NO_DEVICE);
        return start_context(current_device()) ? SUCCESS : fail(OUT_OF_MEMORY);
    }
    Range range;
    {
        Guard guard(mutex);
        auto it = ranges.find(reinterpret_cast<uintptr_t>(pointer));
        if (it == ranges.end()) return fail(INVALID_VALUE);
        range = it->second;
        ranges.erase(it);
    }
    munmap(pointer, round_up(range.size, HOST_PAGE));
    if (range.kind == Kind::DEVICE) {
        if (settings().trace) fprintf(stderr, "nullgpu: cudaFree %zu at %p\n", range.size, pointer);
        give_back(range.device, round_up(range.size, PAGE));
    }
    return SUCCESS;
}

bool find(const void *pointer, Range *range, uintptr_t *start) {
    Guard guard(mutex);
    const Range *is = found(pointer, start);
    if (is) *range = *is;
    return is != nullptr;
}

int copy(void *to, const void *from, size_t size) {
    if (size > settings().copy_max && (on_device(to) || on_device(from))) return SUCCESS;
    if (size) memmove(to, from, size);
    return SUCCESS;
}

int copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height) {
    if (width * height > settings().copy_max) return SUCCESS;
    for (size_t row = 0; row < height; row++)
        copy(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch, width);
    return SUCCESS;
}

int set(void *at, int value, size_t size) {
    if (size <= settings().copy_max) {
        memset(at, value, size);
        return SUCCESS;
    }
    if (value) return SUCCESS;
    uintptr_t begin = reinterpret_cast<uintptr_t>(at), end = begin + size;
    uintptr_t first = round_up(begin, HOST_PAGE), stop = end / HOST_PAGE * HOST_PAGE;
    forget(reinterpret_cast<void *>(first), stop - first);
    memset(at, 0, first - begin);
    memset(reinterpret_cast<void *>(stop), 0, end - stop);
    return SUCCESS;
}

void forget(void *at, size_t size) { madvise(at, size, MADV_DONTNEED); }

void *scratch() {
    static void *the = reserve(64 * MIB);
    return the;
}

}  // namespace nullgpu
