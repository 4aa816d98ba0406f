// The devices that this process sees, their properties, and what CUDA keeps per process: initialisation and contexts.
#define __CUDA_API_VERSION_INTERNAL 1
#include "devices.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "processes.h"
#include "settings.h"

namespace nullgpu {
namespace {

// The cards that CUDA_VISIBLE_DEVICES names by number or by the beginning of a UUID; the first word that names none
// ends the list, as in CUDA.
std::vector<int> visible_cards() {
    std::vector<int> cards;
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int card = 0; card < settings().count; card++) cards.push_back(card);
        return cards;
    }
    std::string words = text;
    for (size_t begin = 0; begin <= words.size() && cards.size() < MAX_DEVICES;) {
        size_t end = words.find(',', begin);
        if (end == std::string::npos) end = words.size();
        std::string word = words.substr(begin, end - begin);
        word.erase(0, word.find_first_not_of(' '));
        int named = -1;
        if (word.compare(0, 4, "GPU-") == 0) {
            for (int card = 0; card < settings().count && named < 0; card++) {
                char uuid[64];
                uuid_text(card, uuid, sizeof uuid);
                if (word.compare(0, std::string::npos, uuid, word.size()) == 0) named = card;
            }
        } else if (!word.empty() && word[0] >= '0' && word[0] <= '9') {
            named = atoi(word.c_str());
        }
        if (named < 0 || named >= settings().count) break;
        cards.push_back(named);
        begin = end + 1;
    }
    return cards;
}

const std::vector<int> &visible() {
    static const std::vector<int> the = visible_cards();
    return the;
}

std::atomic<int> initialised_by{0};
thread_local int current = 0;

std::mutex mutex_of_contexts;
bool contexts[MAX_DEVICES];
int contexts_of = 0;  // the process whose contexts they are

}  // namespace

int visible_count() { return int(visible().size()); }
int card_of(int index) { return is_device(index) ? visible()[size_t(index)] : 0; }

void uuid_of(int card, unsigned char *bytes) {
    // Begins with "NULLGPU" in ASCII, apart from the fourth byte and the last, which are the card.
    const unsigned char base[16] = {0x4e, 0x55, 0x4c, 0, 0x47, 0x50, 0x55, 0, 0x80};
    memcpy(bytes, base, 16);
    bytes[3] = bytes[15] = static_cast<unsigned char>(card);
}

void uuid_text(int card, char *text, size_t size) {
    unsigned char b[16];
    uuid_of(card, b);
    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3],
             b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

void bus_id_text(int card, char *text, size_t size) { snprintf(text, size, "00000000:%02X:00.0", 1 + card); }

bool initialise() {
    int nobody = 0;
    initialised_by.compare_exchange_strong(nobody, getpid());
    return initialised();
}
bool initialised() { return initialised_by == getpid(); }

int current_device() { return current; }
void set_current_device(int index) { current = index; }

bool start_context(int index) {
    std::lock_guard<std::mutex> guard(mutex_of_contexts);
    if (contexts_of != getpid()) memset(contexts, 0, sizeof contexts), contexts_of = getpid();
    if (contexts[index]) return true;
    return contexts[index] = hold(card_of(index), device().context, device().total);
}
bool has_context(int index) {
    std::lock_guard<std::mutex> guard(mutex_of_contexts);
    return contexts_of == getpid() && contexts[index];
}

cudaDeviceProp properties(int index) {
    const Device &d = device();
    cudaDeviceProp p;
    memset(&p, 0, sizeof p);
    snprintf(p.name, sizeof p.name, "%s", d.name.c_str());
    uuid_of(card_of(index), reinterpret_cast<unsigned char *>(p.uuid.bytes));
    p.totalGlobalMem = d.total;
    p.major = d.major;
    p.minor = d.minor;
    p.multiProcessorCount = d.multiprocessors;
    p.maxThreadsPerMultiProcessor = d.threads_per_multiprocessor;
    p.maxBlocksPerMultiProcessor = d.blocks_per_multiprocessor;
    p.sharedMemPerMultiprocessor = d.shared_per_multiprocessor;
    p.sharedMemPerBlockOptin = d.shared_per_block;
    p.l2CacheSize = d.l2_bytes;
    p.persistingL2CacheMaxSize = d.l2_bytes / 2;
    p.memoryBusWidth = d.bus_bits;
    p.pciBusID = 1 + card_of(index);
    p.clusterLaunch = d.major >= 9;
    // The same for compute capabilities 7.5 to 12.0: CUDA C++ Programming Guide, "Technical Specifications per Compute
    // Capability".
    p.sharedMemPerBlock = 48 * 1024;
    p.reservedSharedMemPerBlock = d.major >= 8 ? 1024 : 0;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.warpSize = 32;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 2147483647;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.totalConstMem = 65536;
    p.memPitch = 2147483647;
    p.textureAlignment = p.surfaceAlignment = 512;
    p.texturePitchAlignment = 32;
    p.asyncEngineCount = 3;
    p.ECCEnabled = p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = 1;
    p.streamPrioritiesSupported = p.globalL1CacheSupported = p.localL1CacheSupported = 1;
    p.managedMemory = p.concurrentManagedAccess = p.computePreemptionSupported = 1;
    p.canUseHostPointerForRegisteredMem = p.hostRegisterSupported = 1;
    p.cooperativeLaunch = p.memoryPoolsSupported = p.unifiedFunctionPointers = 1;
    return p;
}

int attribute(int which, int index) {
    cudaDeviceProp p = properties(index);
    switch (which) {
        case cudaDevAttrMaxThreadsPerBlock: return p.maxThreadsPerBlock;
        case cudaDevAttrMaxBlockDimX: return p.maxThreadsDim[0];
        case cudaDevAttrMaxBlockDimY: return p.maxThreadsDim[1];
        case cudaDevAttrMaxBlockDimZ: return p.maxThreadsDim[2];
        case cudaDevAttrMaxGridDimX: return p.maxGridSize[0];
        case cudaDevAttrMaxGridDimY: return p.maxGridSize[1];
        case cudaDevAttrMaxGridDimZ: return p.maxGridSize[2];
        case cudaDevAttrMaxSharedMemoryPerBlock: return int(p.sharedMemPerBlock);
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return int(p.sharedMemPerBlockOptin);
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return int(p.sharedMemPerMultiprocessor);
        case cudaDevAttrReservedSharedMemoryPerBlock: return int(p.reservedSharedMemPerBlock);
        case cudaDevAttrTotalConstantMemory: return int(p.totalConstMem);
        case cudaDevAttrWarpSize: return p.warpSize;
        case cudaDevAttrMaxPitch: return int(p.memPitch);
        case cudaDevAttrMaxRegistersPerBlock: return p.regsPerBlock;
        case cudaDevAttrMaxRegistersPerMultiprocessor: return p.regsPerMultiprocessor;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return p.maxThreadsPerMultiProcessor;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return p.maxBlocksPerMultiProcessor;
        case cudaDevAttrMultiProcessorCount: return p.multiProcessorCount;
        case cudaDevAttrClockRate: return device().clock_khz;
        case cudaDevAttrMemoryClockRate: return device().memory_clock_khz;
        case cudaDevAttrGlobalMemoryBusWidth: return p.memoryBusWidth;
        case cudaDevAttrL2CacheSize: return p.l2CacheSize;
        case cudaDevAttrTextureAlignment: return int(p.textureAlignment);
        case cudaDevAttrPciBusId: return p.pciBusID;
        case cudaDevAttrAsyncEngineCount: return p.asyncEngineCount;
        case cudaDevAttrComputeCapabilityMajor: return p.major;
        case cudaDevAttrComputeCapabilityMinor: return p.minor;
        case cudaDevAttrGpuOverlap:
        case cudaDevAttrCanMapHostMemory:
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrEccEnabled:
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrStreamPrioritiesSupported:
        case cudaDevAttrGlobalL1CacheSupported:
        case cudaDevAttrLocalL1CacheSupported:
        case cudaDevAttrManagedMemory:
        case cudaDevAttrConcurrentManagedAccess:
        case cudaDevAttrComputePreemptionSupported:
        case cudaDevAttrCanUseHostPointerForRegisteredMem:
        case cudaDevAttrHostRegisterSupported:
        case cudaDevAttrCooperativeLaunch:
        case cudaDevAttrMemoryPoolsSupported:
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return p.clusterLaunch;
        default: return 0;  // among them IPC, multicast, fabric handles and host NUMA, which are not stood in for
    }
}

}  // namespace nullgpu
