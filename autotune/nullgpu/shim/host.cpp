// Memory of the host: files of weights are mapped, however large they are.
//
// Checkpoints are mapped privately and writable. Linux refuses one such mapping that is larger than the machine's memory,
// in case all of it is written to. On a null GPU nothing is, and only the beginnings of tensors are read.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common.h"

namespace {

void *map(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    if (file >= 0 && (flags & MAP_PRIVATE) && (protection & PROT_WRITE)) flags |= MAP_NORESERVE;
    return reinterpret_cast<void *>(syscall(SYS_mmap, at, size, protection, flags, file, offset));
}

}  // namespace

EXPORT void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) noexcept {
    return map(at, size, protection, flags, file, offset);
}
EXPORT void *mmap64(void *at, size_t size, int protection, int flags, int file, off64_t offset) noexcept {
    return map(at, size, protection, flags, file, offset);
}
