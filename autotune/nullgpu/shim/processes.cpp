// The table of processes: a file of slots, one for each process that has used a device.
//
// A slot belongs to a living process. Who needs room or a sum first frees the slots of processes that have ended, as the
// driver frees what they held. Changes are made under a lock on the file, which the kernel releases if its owner dies.
#include "processes.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "settings.h"

namespace nullgpu {
namespace {

constexpr int SLOTS = 1024;

struct Slot {
    Identity who;
    uint64_t held[MAX_DEVICES];
};

std::mutex mutex;

// Holds the lock among threads and among processes. The file is opened anew each time, because a lock belongs to an
// open file, and a forked child shares those of its parent.
class Locked {
  public:
    Locked() : guard(mutex), file(open(settings().table.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
        if (file >= 0) flock(file, LOCK_EX);
    }
    ~Locked() {
        if (file < 0) return;
        flock(file, LOCK_UN);  // closing would not do: the first mapping keeps the open file
        close(file);
    }
    Slot *slots() {
        static Slot *the = nullptr;
        if (the) return the;
        size_t size = sizeof(Slot) * SLOTS;
        void *at = MAP_FAILED;
        if (file >= 0 && ftruncate(file, off_t(size)) == 0)
            at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at == MAP_FAILED) {
            fprintf(stderr, "nullgpu: %s cannot be used (%m); other processes are not seen\n", settings().table.c_str());
            at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        }
        if (at == MAP_FAILED) abort();
        return the = static_cast<Slot *>(at);
    }

  private:
    std::lock_guard<std::mutex> guard;
    int file;
};

void free_slots_of_ended(Slot *slots) {
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].who.pid && !alive(slots[i].who)) memset(&slots[i], 0, sizeof slots[i]);
}

size_t sum(const Slot *slots, int card) {
    size_t bytes = 0;
    for (int i = 0; i < SLOTS; i++) bytes += slots[i].held[card];
    return bytes;
}

Slot *own(Slot *slots) {
    // The program that this process ran before exec() holds nothing any more.
    static int claimed_by = 0;
    bool first = claimed_by != getpid();
    claimed_by = getpid();
    Slot *empty = nullptr;
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].who.pid == getpid()) {
            if (first) memset(slots[i].held, 0, sizeof slots[i].held);
            return &slots[i];
        }
        if (!slots[i].who.pid && !empty) empty = &slots[i];
    }
    if (empty) empty->who = this_process();
    return empty;
}

}  // namespace

bool hold(int card, size_t bytes, size_t most) {
    Locked locked;
    Slot *slots = locked.slots();
    free_slots_of_ended(slots);
    Slot *mine = own(slots);
    if (!mine || sum(slots, card) + bytes > most) return false;
    mine->held[card] += bytes;
    return true;
}

void let_go(int card, size_t bytes) {
    Locked locked;
    Slot *mine = own(locked.slots());
    if (mine) mine->held[card] -= bytes < mine->held[card] ? bytes : mine->held[card];
}

size_t held_by_all(int card) {
    Locked locked;
    free_slots_of_ended(locked.slots());
    return sum(locked.slots(), card);
}

int holders(int card, Holder *out, int room) {
    Locked locked;
    Slot *slots = locked.slots();
    free_slots_of_ended(slots);
    int found = 0;
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].held[card]) {
            if (found < room) out[found] = {slots[i].who.pid, slots[i].held[card]};
            found++;
        }
    return found;
}

// Reads /proc/PID/stat, whose fields after the name in parentheses are: state, parent, ..., start time (the 20th).
static bool stat_of(int pid, char *state, uint64_t *birth) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    ssize_t length = ::read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return false;
    text[length] = 0;
    const char *at = strrchr(text, ')');
    if (!at || !at[1]) return false;
    at += 2;
    *state = *at;
    for (int field = 0; at && field < 19; field++) at = strchr(at + 1, ' ');
    *birth = at ? strtoull(at, nullptr, 10) : 0;
    return at != nullptr;
}

Identity this_process() {
    static thread_local Identity the = {0, 0};
    if (the.pid != getpid()) {
        char state;
        uint64_t birth = 0;
        stat_of(getpid(), &state, &birth);
        the = {getpid(), birth};
    }
    return the;
}

bool alive(const Identity &who) {
    char state;
    uint64_t birth;
    return stat_of(who.pid, &state, &birth) && birth == who.birth && state != 'Z' && state != 'X';
}

}  // namespace nullgpu
