// Puts the folder of the hooks first in PYTHONPATH of every process, because commands and scripts replace that variable.
#include <cstdlib>
#include <string>

namespace {

// Runs before Python reads its environment.
__attribute__((constructor)) void add_hooks_to_python_path() {
    const char *hooks = getenv("NULLGPU_HOOKS"), *path = getenv("PYTHONPATH");
    if (!hooks) return;
    std::string before = path ? std::string(":") + path : "", first = std::string(":") + hooks;
    bool has = (before + ":").compare(0, first.size() + 1, first + ":") == 0;
    if (!has) setenv("PYTHONPATH", (first + before).c_str() + 1, 1);
}

}  // namespace
