// The environment variables of a null GPU, read once per process.
//
//   NULLGPU_DEVICE    the device as `field=value;field=value`, written by autotune/nullgpu/environment.py; none: no device
//   NULLGPU_COUNT     number of devices (default 1)
//   NULLGPU_TABLE     file that holds what each process has on each device (default /dev/shm/nullgpu-UID)
//   NULLGPU_COPY_MAX  largest copy, memset or message between ranks that is carried out, in bytes (default 1 MiB)
//   NULLGPU_ALONE     1: one process stands for all ranks of NCCL; the others are taken to hold what it holds
//   NULLGPU_PATIENCE  seconds after which a rank that does not take part is an error of NCCL (default 600)
//   NULLGPU_REFUSED   file to which functions that are refused are added, a line each: its name, a tab, what it is for
//   NULLGPU_TRACE     1: print every cudaMalloc and cudaFree to stderr; 2: also kernel launches and driver entry points
#pragma once
#include <string>

#include "common.h"

namespace nullgpu {

// Sizes in bytes, rates in kHz. autotune/nullgpu/devices.yaml says what each field is and where its value is from.
struct Device {
    std::string name;
    int major = 0, minor = 0;
    int multiprocessors = 0, threads_per_multiprocessor = 0, blocks_per_multiprocessor = 0;
    int clock_khz = 0, memory_clock_khz = 0, bus_bits = 0;
    int l2_bytes = 0;
    size_t shared_per_multiprocessor = 0, shared_per_block = 0;
    size_t total = 0;     // what cudaMemGetInfo calls total
    size_t reserved = 0;  // what the driver keeps of the card for itself: NVML's total less `total`
    size_t context = 0;   // what a process holds as soon as it uses the device
};

struct Settings {
    Device device;
    int count = 0;
    std::string table, refused;
    size_t copy_max = MIB;
    bool alone = false;
    int patience_seconds = 600;
    int trace = 0;
};

const Settings &settings();
inline const Device &device() { return settings().device; }

}  // namespace nullgpu
