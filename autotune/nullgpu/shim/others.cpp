// libcusparse, libcusolver, libnvrtc, libcufft: handles and error texts, so that programs that link them start. Their
// functions that hand results or sizes to the host are refused (autotune/nullgpu/symbols.py).
#include <cstdlib>

#include "common.h"

using namespace nullgpu;

EXPORT int cusparseCreate(void **out) { return *out = new_handle(), 0; }
EXPORT int cusparseDestroy(void *handle) { return free(handle), 0; }
EXPORT const char *cusparseGetErrorString(int) { return "an error of the null GPU"; }

EXPORT int cusolverDnCreate(void **out) { return *out = new_handle(), 0; }
EXPORT int cusolverDnDestroy(void *handle) { return free(handle), 0; }

EXPORT const char *cufftGetErrorString(int) { return "an error of the null GPU"; }

// NVRTC compiles nothing: the driver's modules are not read.
EXPORT int nvrtcVersion(int *major, int *minor) {
    *major = NULLGPU_CUDA_VERSION / 1000;
    *minor = NULLGPU_CUDA_VERSION % 1000 / 10;
    return 0;
}
EXPORT const char *nvrtcGetErrorString(int) { return "an error of the null GPU"; }
EXPORT int nvrtcCreateProgram(void **out, const char *, const char *, int, const char *const *, const char *const *) {
    return *out = new_handle(), 0;
}
EXPORT int nvrtcDestroyProgram(void **program) { return free(*program), *program = nullptr, 0; }
EXPORT int nvrtcGetPTXSize(void *, size_t *size) { return *size = 1, 0; }
EXPORT int nvrtcGetCUBINSize(void *, size_t *size) { return *size = 1, 0; }
EXPORT int nvrtcGetProgramLogSize(void *, size_t *size) { return *size = 1, 0; }
EXPORT int nvrtcGetPTX(void *, char *text) { return *text = 0, 0; }
EXPORT int nvrtcGetCUBIN(void *, char *text) { return *text = 0, 0; }
EXPORT int nvrtcGetProgramLog(void *, char *text) { return *text = 0, 0; }
EXPORT int nvrtcGetLoweredName(void *, const char *, const char **name) { return *name = "kernel", 0; }
