// libcudnn: its backend, a graph of descriptors without content. Every plan is one engine without a workspace; the real
// library's workspaces are not known here.
#include <cstdlib>
#include <cstring>

#include "common.h"

using namespace nullgpu;

EXPORT int cudnnCreate(void **out) { return *out = new_handle(), 0; }
EXPORT int cudnnDestroy(void *handle) { return free(handle), 0; }
EXPORT size_t cudnnGetVersion() { return NULLGPU_CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion() { return NULLGPU_CUDA_VERSION; }
EXPORT int cudnnGetProperty(int which, int *value) {
    const int parts[] = {NULLGPU_CUDNN_VERSION / 10000, NULLGPU_CUDNN_VERSION / 100 % 100, NULLGPU_CUDNN_VERSION % 100};
    return *value = which >= 0 && which < 3 ? parts[which] : 0, 0;
}
EXPORT const char *cudnnGetErrorString(int) { return "an error of the null GPU"; }
EXPORT void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) *text = 0;
}
EXPORT int cudnnBackendCreateDescriptor(int, void **out) { return *out = new_handle(), 0; }
EXPORT int cudnnBackendDestroyDescriptor(void *handle) { return free(handle), 0; }
EXPORT int cudnnBackendGetAttribute(void *, int attribute, int type, int64_t wanted, int64_t *count, void *values) {
    // cudnnBackendAttributeType_t: 2 is a boolean, 3 a 64-bit integer, 15 a descriptor, which the caller has made;
    // the others that are asked for are enumerations.
    constexpr int BOOLEAN = 2, INT64 = 3, DESCRIPTOR = 15;
    if (count) *count = 1;
    if (values && wanted > 0 && type != DESCRIPTOR) memset(values, 0, type == BOOLEAN ? 1 : type == INT64 ? 8 : 4);
    // cudnnBackendAttributeName_t: the number of a graph's engines, below which the frontend names one of them.
    constexpr int ENGINE_GLOBAL_COUNT = 802;
    constexpr int64_t MANY = 1000;
    if (values && wanted > 0 && attribute == ENGINE_GLOBAL_COUNT) memcpy(values, &MANY, sizeof MANY);
    return 0;
}

// Normalisation over a batch, which PyTorch calls by the older API.
EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *, int, int, void *, void *, void *, void *, void *,
                                                                    size_t *size) {
    return *size = 0, 0;
}
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *, int, int, void *, void *, void *, void *, void *, void *,
                                                             void *, size_t *size) {
    return *size = 0, 0;
}
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *, int, int, void *, void *, size_t *size) {
    return *size = 0, 0;
}
