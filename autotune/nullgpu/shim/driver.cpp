// libcuda: the driver's functions that PyTorch, Triton and the runtime call.
#define __CUDA_API_VERSION_INTERNAL 1
#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "devices.h"
#include "errors.h"
#include "launches.h"
#include "memory.h"
#include "processes.h"
#include "settings.h"

#undef cuGetProcAddress
using namespace nullgpu;

static CUresult ok() { return CUDA_SUCCESS; }
static CUresult as_result(int error) { return static_cast<CUresult>(error); }
static void *pointer_of(CUdeviceptr at) { return reinterpret_cast<void *>(at); }
// An opaque handle that nothing looks into.
template <typename Handle>
static CUresult handle_to(Handle *out) {
    *out = static_cast<Handle>(new_handle());
    return ok();
}

// ---- devices and contexts

EXPORT CUresult cuInit(unsigned) {
    if (!initialise()) return CUDA_ERROR_NOT_INITIALIZED;
    return visible_count() ? ok() : CUDA_ERROR_NO_DEVICE;
}
EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = NULLGPU_CUDA_VERSION;
    return ok();
}
EXPORT CUresult cuDeviceGetCount(int *count) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    *count = visible_count();
    return ok();
}
EXPORT CUresult cuDeviceGet(CUdevice *out, int index) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_device(index)) return CUDA_ERROR_INVALID_DEVICE;
    *out = index;
    return ok();
}
EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice) {
    snprintf(name, size_t(size), "%s", device().name.c_str());
    return ok();
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice) {
    *out = device().total;
    return ok();
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) {
    uuid_of(card_of(device), reinterpret_cast<unsigned char *>(out->bytes));
    return ok();
}
EXPORT CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute which, CUdevice device) {
    *out = attribute(which, device);
    return ok();
}
EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice) {
    *major = device().major;
    *minor = device().minor;
    return ok();
}
// A context is its device's index and a constant, so that none is nullptr.
static CUcontext context_of(int index) { return reinterpret_cast<CUcontext>(uintptr_t(0x1000 + index)); }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = has_context(device);
    return ok();
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!start_context(device)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = context_of(device);
    return ok();
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *out) {
    *out = has_context(current_device()) ? context_of(current_device()) : nullptr;
    return ok();
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) set_current_device(int(reinterpret_cast<uintptr_t>(context)) - 0x1000);
    return ok();
}
EXPORT CUresult cuCtxGetDevice(CUdevice *out) {
    *out = current_device();
    return ok();
}
EXPORT CUresult cuCtxGetApiVersion(CUcontext, unsigned *version) {
    *version = NULLGPU_CUDA_VERSION;
    return ok();
}
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit) {
    *value = 0;
    return ok();
}
EXPORT CUresult cuStreamGetCtx(CUstream, CUcontext *out) { return cuCtxGetCurrent(out); }
EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return ok();
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error_text(error);
    return ok();
}
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error_name(error);
    return ok();
}

// ---- modules and kernels: what Triton and NVRTC compile is loaded, and never read

EXPORT CUresult cuModuleLoad(CUmodule *out, const char *) { return handle_to(out); }
EXPORT CUresult cuModuleLoadData(CUmodule *out, const void *) { return handle_to(out); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *out, const void *, unsigned, CUjit_option *, void **) { return handle_to(out); }
EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule, const char *) { return handle_to(out); }
EXPORT CUresult cuLibraryLoadData(CUlibrary *out, const void *, CUjit_option *, void **, unsigned, CUlibraryOption *, void **, unsigned) {
    return handle_to(out);
}
EXPORT CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary, const char *) { return handle_to(out); }
EXPORT CUresult cuLibraryGetModule(CUmodule *out, CUlibrary) { return handle_to(out); }
EXPORT CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel) {
    *out = reinterpret_cast<CUfunction>(kernel);
    return ok();
}
EXPORT CUresult cuFuncGetAttribute(int *out, CUfunction_attribute which, CUfunction) {
    *out = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return ok();
}
EXPORT CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **) {
    return as_result(launched(nullptr));
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **) { return as_result(launched(nullptr)); }
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **) {
    return as_result(launched(nullptr));
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction, int threads, size_t shared) {
    *out = blocks_per_multiprocessor(threads, shared);
    return ok();
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction, const CUlaunchConfig *) {
    *out = device().multiprocessors / 2;
    return ok();
}

// ---- memory

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    size_t held = held_by_all(card_of(current_device()));
    *total = device().total;
    *free = held < *total ? *total - held : 0;
    return ok();
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
    return as_result(allocate(reinterpret_cast<void **>(out), size, Kind::DEVICE));
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr at) { return as_result(release(pointer_of(at))); }
EXPORT CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr at) {
    Range range;
    uintptr_t start;
    if (!find(pointer_of(at), &range, &start)) return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr *>(out) = at; return ok();
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned *>(out) = range.kind == Kind::HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            return ok();
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(out) = range.device; return ok();
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<CUdeviceptr *>(out) = start; return ok();
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t *>(out) = range.size; return ok();
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned *>(out) = range.kind == Kind::MANAGED; return ok();
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start_out, size_t *size, CUdeviceptr at) {
    Range range;
    uintptr_t start;
    if (!find(pointer_of(at), &range, &start)) return CUDA_ERROR_INVALID_VALUE;
    if (start_out) *start_out = start;
    if (size) *size = range.size;
    return ok();
}

// Virtual memory management, which PyTorch's expandable segments use: addresses are reserved apart from physical memory,
// which alone is counted.
struct Physical {
    size_t size;
    int device;
};
EXPORT CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *out = 2 * MIB;
    return ok();
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t, CUdeviceptr, unsigned long long) {
    return as_result(allocate(reinterpret_cast<void **>(out), size, Kind::ADDRESS));
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t) { return as_result(release(pointer_of(at))); }
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *wanted, unsigned long long) {
    bool named = wanted && wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    int device = named ? wanted->location.id : current_device();
    if (!take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{size, device});
    return ok();
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle which) {
    auto *physical = reinterpret_cast<Physical *>(which);
    give_back(physical->device, physical->size);
    delete physical;
    return ok();
}
EXPORT CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return ok(); }
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    forget(pointer_of(at), size);
    return ok();
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return ok(); }

// ---- functions by name

// Tables of functions without documentation, which NVIDIA's own libraries ask for; none of those is here.
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *) {
    *table = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}

void *nullgpu::driver_entry(const char *symbol) {
    static void *self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void *>(&cuInit), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    void *found = nullptr;
    for (const char *version : {"_v3", "_v2", ""})
        if (!found) found = dlsym(self, (std::string(symbol) + version).c_str());
    if (settings().trace > 1) fprintf(stderr, "nullgpu: driver entry %s%s\n", symbol, found ? "" : " (none)");
    return found;
}
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **out, int, cuuint64_t, CUdriverProcAddressQueryResult *status) {
    *out = driver_entry(symbol);
    if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out ? ok() : CUDA_ERROR_NOT_FOUND;
}
