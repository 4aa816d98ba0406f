// The devices that this process sees, their properties, and what CUDA keeps per process: initialisation and contexts.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common.h"

namespace nullgpu {

// A `card` is a device's place in the machine, a device's `index` its place among those that this process sees.
int visible_count();
int card_of(int index);
inline bool is_device(int index) { return index >= 0 && index < visible_count(); }

void uuid_of(int card, unsigned char *bytes);                      // 16 bytes, the same in CUDA and NVML
void uuid_text(int card, char *text, size_t size);                 // GPU-xxxxxxxx-xxxx-...
void bus_id_text(int card, char *text, size_t size);               // 00000000:01:00.0, as NVML writes it

// As the driver: nothing works before it is initialised, nor in a child of a process that has initialised it.
bool initialise();
bool initialised();

// The device of this thread.
int current_device();
void set_current_device(int index);

// Makes this process's context on a device, which holds memory there. False: there is no room for it.
bool start_context(int index);
bool has_context(int index);

cudaDeviceProp properties(int index);
int attribute(int which, int index);

}  // namespace nullgpu
