// Error codes of the runtime and the driver (they have the same numbers), and refusals of what cannot be stood in for.
#pragma once
#include "common.h"

namespace nullgpu {

enum Error : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALISED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    SYMBOL_NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
};

// Keeps an error for cudaGetLastError, and returns it.
int fail(int error);
int last_error();
int take_last_error();

// Adds a refused function to the file of NULLGPU_REFUSED.
void write_down(const char *function, const char *belongs_to);

const char *error_name(int error);
// The text of NOT_SUPPORTED names the function of this thread that was refused last.
const char *error_text(int error);

}  // namespace nullgpu

// Refuses a function by name: prints it once per process, keeps it for error_text, and returns `code`. The generated
// stubs of autotune/nullgpu/symbols.py call it too.
extern "C" long nullgpu_refuse(const char *function, const char *belongs_to, long code);
