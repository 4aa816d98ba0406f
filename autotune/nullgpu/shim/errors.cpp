// Error codes, their texts, and refusals of what cannot be stood in for.
#include "errors.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>

#include "settings.h"

namespace nullgpu {
namespace {

thread_local int last = SUCCESS;
thread_local std::string refusal;

}  // namespace

int fail(int error) { return last = error; }
int last_error() { return last; }
int take_last_error() {
    int error = last;
    last = SUCCESS;
    return error;
}

// Lines of several processes stay whole: each is one write at the end of the file.
void write_down(const char *function, const char *belongs_to) {
    FILE *file = settings().refused.empty() ? nullptr : fopen(settings().refused.c_str(), "ae");
    if (!file) return;
    fprintf(file, "%s\t%s\n", function, belongs_to);
    fclose(file);
}

const char *error_name(int error) {
    switch (error) {
        case SUCCESS: return "cudaSuccess";
        case INVALID_VALUE: return "cudaErrorInvalidValue";
        case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
        case NOT_INITIALISED: return "cudaErrorInitializationError";
        case NO_DEVICE: return "cudaErrorNoDevice";
        case INVALID_DEVICE: return "cudaErrorInvalidDevice";
        case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
        case SYMBOL_NOT_FOUND: return "cudaErrorSymbolNotFound";
        case NOT_SUPPORTED: return "cudaErrorNotSupported";
        default: return "cudaErrorUnknown";
    }
}

const char *error_text(int error) {
    switch (error) {
        case SUCCESS: return "no error";
        case INVALID_VALUE: return "invalid argument";
        case OUT_OF_MEMORY: return "out of memory";
        case NOT_INITIALISED: return "initialization error";
        case NO_DEVICE: return "no CUDA-capable device is detected";
        case INVALID_DEVICE: return "invalid device ordinal";
        case INVALID_HANDLE: return "invalid resource handle";
        case SYMBOL_NOT_FOUND: return "named symbol not found";
        case NOT_SUPPORTED: return refusal.empty() ? "operation not supported" : refusal.c_str();
        default: return "unknown error";
    }
}

}  // namespace nullgpu

long nullgpu_refuse(const char *function, const char *belongs_to, long code) {
    static std::mutex mutex;
    static std::set<std::string> printed;
    std::string text = std::string("operation not supported: a null GPU cannot stand in for ") + function + " (" + belongs_to + ")";
    nullgpu::refusal = text;
    std::lock_guard<std::mutex> guard(mutex);
    if (printed.insert(function).second) {
        fprintf(stderr, "nullgpu: %s\n", text.c_str());
        nullgpu::write_down(function, belongs_to);
    }
    if (code == nullgpu::NOT_SUPPORTED) nullgpu::fail(int(code));
    return code;
}
