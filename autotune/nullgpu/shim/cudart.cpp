// libcudart: devices, memory, streams, events and launches of the CUDA runtime.
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "devices.h"
#include "driver.h"
#include "errors.h"
#include "launches.h"
#include "memory.h"
#include "processes.h"
#include "settings.h"

using namespace nullgpu;

static cudaError_t ok() { return cudaSuccess; }
static cudaError_t as_error(int error) { return static_cast<cudaError_t>(error); }
static cudaError_t failed(int error) { return as_error(fail(error)); }

// ---- devices

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    if (!initialise()) return failed(NOT_INITIALISED);
    *count = visible_count();
    return *count ? ok() : failed(NO_DEVICE);
}
EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = current_device();
    return ok();
}
EXPORT cudaError_t cudaSetDevice(int device) {
    if (!initialise()) return failed(NOT_INITIALISED);
    if (!is_device(device)) return failed(INVALID_DEVICE);
    set_current_device(device);
    return start_context(device) ? ok() : failed(OUT_OF_MEMORY);  // since CUDA 12, this makes the context
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int device) {
    if (!initialise()) return failed(NOT_INITIALISED);
    if (!is_device(device)) return failed(INVALID_DEVICE);
    *out = properties(device);
    return ok();
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device) {
    if (!is_device(device)) return failed(INVALID_DEVICE);
    *value = attribute(which, device);
    return ok();
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    char whole[32];
    bus_id_text(card_of(device), whole, sizeof whole);
    snprintf(text, size_t(size), "%s", whole + 4);  // CUDA writes a domain of four digits, NVML of eight
    return ok();
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return ok();
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 1;
    return ok();
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = NULLGPU_CUDA_VERSION;
    return ok();
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = NULLGPU_CUDA_VERSION;
    return ok();
}
EXPORT cudaError_t cudaGetLastError() { return as_error(take_last_error()); }
EXPORT cudaError_t cudaPeekAtLastError() { return as_error(last_error()); }
EXPORT const char *cudaGetErrorString(cudaError_t error) { return error_text(error); }
EXPORT const char *cudaGetErrorName(cudaError_t error) { return error_name(error); }

// ---- memory

EXPORT cudaError_t cudaMalloc(void **out, size_t size) { return as_error(allocate(out, size, Kind::DEVICE)); }
EXPORT cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t) { return cudaMalloc(out, size); }
EXPORT cudaError_t cudaMallocManaged(void **out, size_t size, unsigned) { return as_error(allocate(out, size, Kind::MANAGED)); }
EXPORT cudaError_t cudaHostAlloc(void **out, size_t size, unsigned) { return as_error(allocate(out, size, Kind::HOST)); }
EXPORT cudaError_t cudaFree(void *pointer) { return as_error(release(pointer)); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return as_error(release(pointer)); }
EXPORT cudaError_t cudaFreeHost(void *pointer) { return pointer ? as_error(release(pointer)) : ok(); }
EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    if (!initialise()) return failed(NOT_INITIALISED);
    if (!visible_count()) return failed(NO_DEVICE);
    if (!start_context(current_device())) return failed(OUT_OF_MEMORY);
    size_t held = held_by_all(card_of(current_device()));
    *total = device().total;
    *free = held < *total ? *total - held : 0;
    return ok();
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) { return as_error(copy(to, from, size)); }
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t) {
    return as_error(copy(to, from, size));
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t) {
    return as_error(copy(to, from, size));
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t) {
    return as_error(copy_rows(to, to_pitch, from, from_pitch, width, height));
}
EXPORT cudaError_t cudaMemset(void *at, int value, size_t size) { return as_error(set(at, value, size)); }
EXPORT cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t) { return as_error(set(at, value, size)); }
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *pointer) {
    Range range;
    memset(out, 0, sizeof *out);
    out->device = -1;
    out->type = cudaMemoryTypeUnregistered;
    if (!find(pointer, &range, nullptr)) return ok();
    out->device = range.device;
    out->devicePointer = const_cast<void *>(pointer);
    if (range.kind != Kind::DEVICE && range.kind != Kind::ADDRESS) out->hostPointer = const_cast<void *>(pointer);
    out->type = range.kind == Kind::HOST      ? cudaMemoryTypeHost
                : range.kind == Kind::MANAGED ? cudaMemoryTypeManaged
                                              : cudaMemoryTypeDevice;
    return ok();
}
EXPORT cudaError_t cudaGetSymbolAddress(void **out, const void *) {
    *out = scratch();
    return ok();
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) {
    *pool = static_cast<cudaMemPool_t>(new_handle());
    return ok();
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
    *static_cast<uint64_t *>(value) = 0;
    return ok();
}

// ---- streams and events: all work is done at once, in the thread that asks for it

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned, int) {
    *out = static_cast<cudaStream_t>(new_handle());
    return ok();
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned) { return cudaStreamCreateWithPriority(out, 0, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return ok();
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
    *priority = 0;
    return ok();
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return ok();
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return ok();
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
    function(data);
    return ok();
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned) {
    function(stream, cudaSuccess, data);
    return ok();
}

// An event holds the time of the host's clock at which it was recorded.
struct Event {
    timespec at;
};
static Event *event_of(cudaEvent_t event) { return reinterpret_cast<Event *>(event); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned) {
    *out = reinterpret_cast<cudaEvent_t>(new Event());
    return ok();
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event_of(event);
    return ok();
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
    clock_gettime(CLOCK_MONOTONIC, &event_of(event)->at);
    return ok();
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    const timespec &a = event_of(begin)->at, &b = event_of(end)->at;
    *milliseconds = float(double(b.tv_sec - a.tv_sec) * 1e3 + double(b.tv_nsec - a.tv_nsec) * 1e-6);
    return ok();
}

// ---- kernels

EXPORT void **__cudaRegisterFatBinary(void *) {
    static void *binary[64];
    return binary;
}
EXPORT char __cudaInitModule(void **) { return 1; }

// `kernel<<<grid, block, shared, stream>>>(...)` is compiled to a push of the four, and a stub that pops them and launches.
struct Call {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
constexpr int MOST_CALLS = 8;
static thread_local Call calls[MOST_CALLS];
static thread_local int depth = 0;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    if (depth < MOST_CALLS) calls[depth++] = {grid, block, shared, stream};
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!depth) return ok();
    const Call &call = calls[--depth];
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *static_cast<cudaStream_t *>(stream) = call.stream;
    return ok();
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) {
    *out = static_cast<cudaKernel_t>(const_cast<void *>(function));
    return ok();
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) {
    return as_error(launched(kernel));
}
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
    return as_error(launched(function));
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
    return as_error(launched(function));
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **) {
    return as_error(launched(function));
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->maxDynamicSharedSizeBytes = int(device().shared_per_block);
    // The newest architecture of PyTorch's build that the device runs: CUB chooses its tuning by it, and knows no others.
    for (int built : {NULLGPU_ARCHITECTURES})
        if (built <= device().major * 10 + device().minor) out->ptxVersion = out->binaryVersion = built;
    return ok();
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int threads, size_t shared, unsigned) {
    *count = blocks_per_multiprocessor(threads, shared);
    return ok();
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int threads, size_t shared) {
    *count = blocks_per_multiprocessor(threads, shared);
    return ok();
}

// ---- the driver's functions, by name

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *status) {
    *out = driver_entry(symbol);
    if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *out ? ok() : failed(SYMBOL_NOT_FOUND);
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **out, unsigned long long flags,
                                           cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(symbol, out, NULLGPU_CUDA_VERSION, flags, status);
}
