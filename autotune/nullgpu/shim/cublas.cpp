// libcublas and libcublasLt: handles, descriptors and versions. Products are stubs; the heuristic offers one algorithm
// that needs no workspace of its own, so what PyTorch sets aside for cuBLAS is PyTorch's own figure.
#include <cstdlib>
#include <cstring>

#include "common.h"

using namespace nullgpu;

static int made(void **out) { return *out = new_handle(), 0; }
static int freed(void *handle) { return free(handle), 0; }

EXPORT int cublasCreate_v2(void **out) { return made(out); }
EXPORT int cublasDestroy_v2(void *handle) { return freed(handle); }
EXPORT int cublasGetVersion_v2(void *, int *version) { return *version = NULLGPU_CUBLAS_VERSION, 0; }
EXPORT int cublasGetProperty(int which, int *value) {
    const int parts[] = {NULLGPU_CUBLAS_VERSION / 10000, NULLGPU_CUBLAS_VERSION / 100 % 100, NULLGPU_CUBLAS_VERSION % 100};
    return *value = which >= 0 && which < 3 ? parts[which] : 0, 0;
}
EXPORT int cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0, 0; }
EXPORT int cublasGetMathMode(void *, int *mode) { return *mode = 0, 0; }
EXPORT int cublasGetStream_v2(void *, void **stream) { return *stream = nullptr, 0; }
EXPORT const char *cublasGetStatusString(int) { return "an error of the null GPU"; }
EXPORT const char *cublasGetStatusName(int) { return "an error of the null GPU"; }

EXPORT int cublasLtCreate(void **out) { return made(out); }
EXPORT int cublasLtDestroy(void *handle) { return freed(handle); }
EXPORT size_t cublasLtGetVersion() { return NULLGPU_CUBLAS_VERSION; }
EXPORT size_t cublasLtGetCudartVersion() { return NULLGPU_CUDA_VERSION; }
EXPORT int cublasLtGetProperty(int which, int *value) { return cublasGetProperty(which, value); }
EXPORT const char *cublasLtGetStatusString(int) { return "an error of the null GPU"; }
EXPORT const char *cublasLtGetStatusName(int) { return "an error of the null GPU"; }
EXPORT int cublasLtMatmulDescCreate(void **out, int, int) { return made(out); }
EXPORT int cublasLtMatmulDescDestroy(void *handle) { return freed(handle); }
EXPORT int cublasLtMatrixLayoutCreate(void **out, int, uint64_t, uint64_t, int64_t) { return made(out); }
EXPORT int cublasLtMatrixLayoutDestroy(void *handle) { return freed(handle); }
EXPORT int cublasLtMatmulPreferenceCreate(void **out) { return made(out); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *handle) { return freed(handle); }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int wanted, void *results, int *count) {
    // cublasLtMatmulHeuristicResult_t: algorithm (64 bytes), workspace size, state, waves, reserved.
    if (wanted > 0) memset(results, 0, 96);
    return *count = wanted > 0, 0;
}
