// What the runtime asks the driver for: its functions by name.
#pragma once

namespace nullgpu {

// Returns a function of the driver, in its newest version, or nullptr.
void *driver_entry(const char *symbol);

}  // namespace nullgpu
