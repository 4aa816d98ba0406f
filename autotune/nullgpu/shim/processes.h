// What each process holds on each device, in a file that all processes share: for NVML, cudaMemGetInfo and out-of-memory.
#pragma once
#include <sys/types.h>

#include "common.h"

namespace nullgpu {

// Adds bytes to what this process holds on a card, unless all processes together would then hold more than `most`.
bool hold(int card, size_t bytes, size_t most);
void let_go(int card, size_t bytes);

// Bytes that all living processes hold on a card.
size_t held_by_all(int card);

struct Holder {
    pid_t pid;
    size_t bytes;
};
// Writes up to `room` living processes that hold something on a card; returns how many there are.
int holders(int card, Holder *out, int room);

// A process, told apart from a later one with the same number: the number and the time at which it started (in clock
// ticks since boot). A process that has ended, or is a zombie, is not alive.
struct Identity {
    int pid;
    uint64_t birth;
};
Identity this_process();
bool alive(const Identity &who);

}  // namespace nullgpu
