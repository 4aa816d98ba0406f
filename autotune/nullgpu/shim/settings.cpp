// Reads the environment variables of a null GPU; settings.h lists them.
#include "settings.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>

namespace nullgpu {
namespace {

std::string variable(const char *name, const std::string &otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

std::map<std::string, std::string> fields_of(const std::string &text) {
    std::map<std::string, std::string> fields;
    for (size_t begin = 0; begin < text.size();) {
        size_t end = text.find(';', begin);
        if (end == std::string::npos) end = text.size();
        std::string field = text.substr(begin, end - begin);
        size_t equals = field.find('=');
        if (equals != std::string::npos) fields[field.substr(0, equals)] = field.substr(equals + 1);
        begin = end + 1;
    }
    return fields;
}

// Fills a device; returns the first field that the text lacks, or nothing.
const char *fill(Device &device, const std::string &text) {
    auto fields = fields_of(text);
    const char *missing = nullptr;
    auto number = [&](const char *name) -> size_t {
        auto found = fields.find(name);
        if (found == fields.end()) return missing = name, 0;
        return strtoull(found->second.c_str(), nullptr, 10);
    };
    device.name = fields["name"];
    device.major = int(number("major"));
    device.minor = int(number("minor"));
    device.multiprocessors = int(number("multiprocessors"));
    device.threads_per_multiprocessor = int(number("threads_per_multiprocessor"));
    device.blocks_per_multiprocessor = int(number("blocks_per_multiprocessor"));
    device.clock_khz = int(number("clock_khz"));
    device.memory_clock_khz = int(number("memory_clock_khz"));
    device.bus_bits = int(number("bus_bits"));
    device.l2_bytes = int(number("l2_bytes"));
    device.shared_per_multiprocessor = number("shared_per_multiprocessor");
    device.shared_per_block = number("shared_per_block");
    device.total = number("total");
    device.reserved = number("reserved");
    device.context = number("context");
    return missing;
}

Settings read() {
    Settings settings;
    std::string device = variable("NULLGPU_DEVICE", "");
    if (!device.empty()) {
        const char *missing = fill(settings.device, device);
        if (missing)
            fprintf(stderr, "nullgpu: NULLGPU_DEVICE lacks %s, so there is no device\n", missing);
        else
            settings.count = atoi(variable("NULLGPU_COUNT", "1").c_str());
    }
    if (settings.count > MAX_DEVICES) settings.count = MAX_DEVICES;
    settings.table = variable("NULLGPU_TABLE", "/dev/shm/nullgpu-" + std::to_string(getuid()));
    settings.refused = variable("NULLGPU_REFUSED", "");
    settings.copy_max = strtoull(variable("NULLGPU_COPY_MAX", "1048576").c_str(), nullptr, 10);
    settings.alone = variable("NULLGPU_ALONE", "0") == "1";
    settings.patience_seconds = atoi(variable("NULLGPU_PATIENCE", "600").c_str());
    settings.trace = atoi(variable("NULLGPU_TRACE", "0").c_str());
    return settings;
}

}  // namespace

const Settings &settings() {
    static const Settings the = read();
    return the;
}

void *new_handle() { return calloc(1, 4096); }

}  // namespace nullgpu
