// libnvidia-ml (NVML): the cards of the machine, their memory, and the processes that hold some of it.
#include <cstdio>
#include <cstring>
#include <strings.h>

#include "devices.h"
#include "processes.h"
#include "settings.h"

using namespace nullgpu;

namespace {

enum Code : int { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
constexpr unsigned NO_INSTANCE = 0xffffffff;  // neither a GPU instance nor a compute instance of MIG
constexpr int MOST_PROCESSES = 1024;

// A handle is the card's number and one, so that none is nullptr.
typedef void *Handle;
int number_of(Handle handle) { return int(reinterpret_cast<uintptr_t>(handle)) - 1; }
int handle_to(int card, Handle *out) {
    if (card < 0 || card >= settings().count) return INVALID_ARGUMENT;
    *out = reinterpret_cast<Handle>(uintptr_t(card + 1));
    return SUCCESS;
}
int text_to(char *out, unsigned size, const char *text) {
    snprintf(out, size, "%s", text);
    return SUCCESS;
}

}  // namespace

EXPORT int nvmlInit() { return SUCCESS; }
EXPORT int nvmlInit_v2() { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned) { return SUCCESS; }
EXPORT int nvmlShutdown() { return SUCCESS; }
EXPORT const char *nvmlErrorString(int error) {
    switch (error) {
        case SUCCESS: return "Success";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case INSUFFICIENT_SIZE: return "Insufficient Size";
        default: return "Unknown Error";
    }
}

// The driver's version says that it is none of NVIDIA's.
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size) { return text_to(text, size, "0.0-nullgpu"); }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = NULLGPU_CUDA_VERSION, SUCCESS; }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) { return *count = unsigned(settings().count), SUCCESS; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *out) { return handle_to(int(index), out); }
EXPORT int nvmlDeviceGetHandleByUUID(const char *wanted, Handle *out) {
    char text[64];
    for (int card = 0; card < settings().count; card++) {
        uuid_text(card, text, sizeof text);
        if (!strcmp(text, wanted)) return handle_to(card, out);
    }
    return NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, Handle *out) {
    char text[32];
    for (int card = 0; card < settings().count; card++) {
        bus_id_text(card, text, sizeof text);
        // A domain of four digits is as good as one of eight.
        if (!strcasecmp(text, wanted) || !strcasecmp(text + 4, wanted)) return handle_to(card, out);
    }
    return NOT_FOUND;
}
EXPORT int nvmlDeviceGetIndex(Handle device, unsigned *out) { return *out = unsigned(number_of(device)), SUCCESS; }
EXPORT int nvmlDeviceGetName(Handle, char *text, unsigned size) { return text_to(text, size, device().name.c_str()); }
EXPORT int nvmlDeviceGetUUID(Handle device, char *text, unsigned size) {
    uuid_text(number_of(device), text, size);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(Handle, int *major, int *minor) {
    *major = device().major;
    *minor = device().minor;
    return SUCCESS;
}
EXPORT int nvmlDeviceIsMigDeviceHandle(Handle, unsigned *is) { return *is = 0, SUCCESS; }
EXPORT int nvmlDeviceGetUtilizationRates(Handle, unsigned *out) { return out[0] = out[1] = 0, SUCCESS; }
// What scripts log beside it: nothing is measured.
EXPORT int nvmlDeviceGetTemperature(Handle, int, unsigned *out) { return *out = 0, SUCCESS; }
EXPORT int nvmlDeviceGetClockInfo(Handle, int, unsigned *out) { return *out = 0, SUCCESS; }
EXPORT int nvmlDeviceGetPowerUsage(Handle, unsigned *out) { return *out = 0, SUCCESS; }
EXPORT int nvmlDeviceGetPowerManagementLimit(Handle, unsigned *out) { return *out = 0, SUCCESS; }
EXPORT int nvmlDeviceGetEnforcedPowerLimit(Handle, unsigned *out) { return *out = 0, SUCCESS; }
EXPORT int nvmlDeviceGetTotalEnergyConsumption(Handle, uint64_t *out) { return *out = 0, SUCCESS; }
EXPORT int nvmlDeviceGetP2PStatus(Handle, Handle, int, int *status) { return *status = 0, SUCCESS; }

// nvmlMemory_t counts what the driver keeps for itself as used, nvmlMemory_v2_t tells it apart.
EXPORT int nvmlDeviceGetMemoryInfo(Handle handle, uint64_t *out) {
    uint64_t held = held_by_all(number_of(handle)), total = device().total, reserved = device().reserved;
    out[0] = total + reserved;
    out[1] = held < total ? total - held : 0;
    out[2] = out[0] - out[1];
    return SUCCESS;
}
struct MemoryV2 {
    unsigned version;
    uint64_t total, reserved, free, used;
};
EXPORT int nvmlDeviceGetMemoryInfo_v2(Handle handle, MemoryV2 *out) {
    uint64_t held = held_by_all(number_of(handle)), total = device().total;
    out->total = total + device().reserved;
    out->reserved = device().reserved;
    out->used = held;
    out->free = held < total ? total - held : 0;
    return SUCCESS;
}

struct ProcessV1 {
    unsigned pid;
    uint64_t used;
};
struct ProcessV3 {
    unsigned pid;
    uint64_t used;
    unsigned gpu_instance, compute_instance;
};
static int running(Handle device, unsigned *count, Holder *out) {
    int found = holders(number_of(device), out, MOST_PROCESSES);
    bool fits = unsigned(found) <= *count;
    *count = unsigned(found);
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, ProcessV3 *out) {
    Holder found[MOST_PROCESSES];
    int code = running(device, count, found);
    for (unsigned i = 0; code == SUCCESS && i < *count; i++)
        out[i] = {unsigned(found[i].pid), found[i].bytes, NO_INSTANCE, NO_INSTANCE};
    return code;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(Handle device, unsigned *count, ProcessV1 *out) {
    Holder found[MOST_PROCESSES];
    int code = running(device, count, found);
    for (unsigned i = 0; code == SUCCESS && i < *count; i++) out[i] = {unsigned(found[i].pid), found[i].bytes};
    return code;
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle, unsigned *count, void *) { return *count = 0, SUCCESS; }
// There is no NVLink, and no fabric: the state, after the version in nvmlGpuFabricInfoV_t, is 0.
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(Handle, unsigned, int *) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, void *) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(Handle, char *out) { return memset(out + 4, 0, 28), SUCCESS; }
