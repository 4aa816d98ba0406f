// libnccl: communicators and collectives over the exchange of ranks.h.
//
// A collective is carried out when it is called, not when a stream reaches it, so the calling thread waits for the other
// ranks. Messages within a group are carried out at its end, sends first, since their order among ranks is free.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "common.h"
#include "numbers.h"
#include "ranks.h"

using namespace nullgpu;

namespace {

constexpr int UNIQUE_ID_BYTES = 128;
struct UniqueId {
    char bytes[UNIQUE_ID_BYTES];
};

std::mutex mutex_of_scales;
std::map<int, double> scales;  // of the operations that ncclRedOpCreatePreMulSum made
int next_operation = CUSTOM;

double scale_of(int operation) {
    if (operation < CUSTOM) return 1;
    std::lock_guard<std::mutex> guard(mutex_of_scales);
    auto found = scales.find(operation);
    return found == scales.end() ? 1 : found->second;
}

Ranks *of(void *communicator) { return static_cast<Ranks *>(communicator); }

Call call_of(const char *name, size_t count, int type, int operation = SUM, int root = -1) {
    Call call;
    memset(&call, 0, sizeof call);
    snprintf(call.name, sizeof call.name, "%s", name);
    call.count = count;
    call.type = type;
    // Each rank numbers its own operations.
    call.operation = operation < CUSTOM ? operation : CUSTOM;
    call.root = root;
    return call;
}

struct Message {
    Ranks *ranks;
    bool sends;
    void *at;
    size_t bytes;
    int peer;
};
thread_local int depth_of_groups = 0;
thread_local std::vector<Message> messages;

int deliver() {
    std::vector<Message> all;
    all.swap(messages);
    int code = NCCL_OK;
    // A sender can be a few messages ahead of a receiver, so sends and receives of a long group take turns.
    std::vector<Message> sends, receives;
    for (const Message &each : all) (each.sends ? sends : receives).push_back(each);
    for (size_t i = 0; i < sends.size() || i < receives.size(); i++) {
        if (!code && i < sends.size()) code = sends[i].ranks->send(sends[i].peer, sends[i].at, sends[i].bytes);
        if (!code && i < receives.size()) code = receives[i].ranks->receive(receives[i].peer, receives[i].at, receives[i].bytes);
    }
    return code;
}
int message(void *communicator, bool sends, void *at, size_t count, int type, int peer) {
    if (!is_type(type)) return problem_of(NCCL_INVALID_ARGUMENT, "unknown data type");
    messages.push_back({of(communicator), sends, at, count * size_of(type), peer});
    return depth_of_groups ? NCCL_OK : deliver();
}

void write(void *to, const void *from, size_t bytes) {
    if (to != from && bytes) memmove(to, from, bytes);
}

}  // namespace

// ---- communicators

EXPORT int ncclGetVersion(int *version) { return *version = NULLGPU_NCCL_VERSION, NCCL_OK; }
EXPORT int ncclGetUniqueId(UniqueId *id) {
    memset(id, 0, sizeof *id);
    unsigned char random[16] = {};
    int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    bool read = file >= 0 && ::read(file, random, sizeof random) == ssize_t(sizeof random);
    if (file >= 0) close(file);
    if (!read) return problem_of(NCCL_SYSTEM_ERROR, "/dev/urandom cannot be read");
    for (size_t i = 0; i < sizeof random; i++) snprintf(id->bytes + 2 * i, 3, "%02x", random[i]);
    return NCCL_OK;
}
EXPORT int ncclCommInitRank(void **out, int size, UniqueId id, int rank) {
    id.bytes[UNIQUE_ID_BYTES - 1] = 0;
    Ranks *ranks;
    int code = Ranks::join(id.bytes, size, rank, &ranks);
    *out = ranks;
    return code;
}
EXPORT int ncclCommInitRankConfig(void **out, int size, UniqueId id, int rank, void *) { return ncclCommInitRank(out, size, id, rank); }
EXPORT int ncclCommInitRankScalable(void **out, int size, int rank, int, UniqueId *ids, void *) {
    return ncclCommInitRank(out, size, ids[0], rank);
}
EXPORT int ncclCommSplit(void *communicator, int color, int key, void **out, void *) {
    constexpr int NO_COLOR = -1;
    Ranks &ranks = *of(communicator);
    *out = nullptr;
    const int mine[2] = {color, key};
    std::vector<const void *> all;
    int code = ranks.exchange(call_of("CommSplit", 2, INT32), mine, sizeof mine, &all);
    if (code || color == NO_COLOR) return code;
    int size = 0, rank = 0;
    for (int peer = 0; peer < ranks.size; peer++) {
        int theirs[2];
        memcpy(theirs, all[size_t(peer)], sizeof theirs);
        if (theirs[0] != color) continue;
        size++;
        if (theirs[1] < key || (theirs[1] == key && peer < ranks.rank)) rank++;
    }
    Ranks *part;
    std::string name = ranks.name + "." + std::to_string(ranks.exchanges()) + "." + std::to_string(color);
    code = Ranks::join(name, size, rank, &part);
    *out = part;
    return code;
}
EXPORT int ncclCommCount(void *communicator, int *out) { return *out = of(communicator)->size, NCCL_OK; }
EXPORT int ncclCommUserRank(void *communicator, int *out) { return *out = of(communicator)->rank, NCCL_OK; }
EXPORT int ncclCommGetAsyncError(void *communicator, int *error) { return *error = of(communicator)->error(), NCCL_OK; }
EXPORT int ncclCommFinalize(void *) { return NCCL_OK; }
EXPORT int ncclCommDestroy(void *communicator) { return delete of(communicator), NCCL_OK; }
EXPORT int ncclCommAbort(void *communicator) {
    // Another thread may be in a collective; what it uses is left to the end of the process.
    of(communicator)->abort();
    return NCCL_OK;
}
EXPORT const char *ncclGetLastError(void *) { return problem().c_str(); }
EXPORT const char *ncclGetErrorString(int code) {
    switch (code) {
        case NCCL_OK: return "no error";
        case NCCL_SYSTEM_ERROR: return "unhandled system error";
        case NCCL_INVALID_ARGUMENT: return "invalid argument";
        case NCCL_INVALID_USAGE: return "invalid usage";
        case NCCL_REMOTE_ERROR: return "remote process exited or there was a network error";
        default: return "not supported by the null GPU";
    }
}

// ---- operations

EXPORT int ncclRedOpCreatePreMulSum(int *operation, const void *scalar, int type, int, void *) {
    if (!is_type(type)) return problem_of(NCCL_INVALID_ARGUMENT, "unknown data type");
    // Device memory can be read as the host's.
    bool integer = type < HALF;
    std::lock_guard<std::mutex> guard(mutex_of_scales);
    *operation = next_operation++;
    scales[*operation] = integer ? 1 : number_at(scalar, type);
    return NCCL_OK;
}
EXPORT int ncclRedOpDestroy(int operation, void *) {
    std::lock_guard<std::mutex> guard(mutex_of_scales);
    return scales.erase(operation), NCCL_OK;
}

// ---- collectives

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *communicator, void *) {
    std::vector<const void *> all;
    int code = of(communicator)->exchange(call_of("AllReduce", count, type, operation), from, count * size_of(type), &all);
    if (!code && !all.empty()) reduce(to, all, count, type, operation, scale_of(operation));
    return code;
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, void *communicator, void *) {
    std::vector<const void *> all;
    Ranks &ranks = *of(communicator);
    int code = ranks.exchange(call_of("Reduce", count, type, operation, root), from, count * size_of(type), &all);
    if (!code && !all.empty() && ranks.rank == root) reduce(to, all, count, type, operation, scale_of(operation));
    return code;
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *communicator, void *) {
    std::vector<const void *> all;
    Ranks &ranks = *of(communicator);
    size_t bytes = count * size_of(type);
    // Only the root's bytes are read; those of the others may not be there.
    int code = ranks.exchange(call_of("Broadcast", count, type, SUM, root), ranks.rank == root ? from : to, bytes, &all);
    if (!code && !all.empty()) write(to, all[size_t(root)], bytes);
    return code;
}
EXPORT int ncclBcast(void *at, size_t count, int type, int root, void *communicator, void *stream) {
    return ncclBroadcast(at, at, count, type, root, communicator, stream);
}
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, void *communicator, void *) {
    std::vector<const void *> all;
    size_t bytes = count * size_of(type);
    int code = of(communicator)->exchange(call_of("AllGather", count, type), from, bytes, &all);
    for (size_t peer = 0; !code && peer < all.size(); peer++) write(static_cast<char *>(to) + peer * bytes, all[peer], bytes);
    return code;
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, void *communicator, void *) {
    std::vector<const void *> all;
    Ranks &ranks = *of(communicator);
    size_t bytes = count * size_of(type), skipped = bytes * size_t(ranks.rank);
    int code = ranks.exchange(call_of("ReduceScatter", count, type, operation), from, bytes * size_t(ranks.size), &all);
    for (const void *&each : all) each = static_cast<const char *>(each) + skipped;
    if (!code && !all.empty()) reduce(to, all, count, type, operation, scale_of(operation));
    return code;
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, void *communicator, void *) {
    std::vector<const void *> all;
    Ranks &ranks = *of(communicator);
    size_t bytes = count * size_of(type), skipped = bytes * size_t(ranks.rank);
    int code = ranks.exchange(call_of("AlltoAll", count, type), from, bytes * size_t(ranks.size), &all);
    for (size_t peer = 0; !code && peer < all.size(); peer++)
        write(static_cast<char *>(to) + peer * bytes, static_cast<const char *>(all[peer]) + skipped, bytes);
    return code;
}

// ---- messages

EXPORT int ncclSend(const void *from, size_t count, int type, int peer, void *communicator, void *) {
    return message(communicator, true, const_cast<void *>(from), count, type, peer);
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, void *communicator, void *) {
    return message(communicator, false, to, count, type, peer);
}
EXPORT int ncclGroupStart() { return depth_of_groups++, NCCL_OK; }
EXPORT int ncclGroupEnd() {
    if (depth_of_groups == 0) return problem_of(NCCL_INVALID_USAGE, "a group ends that did not start");
    return --depth_of_groups ? NCCL_OK : deliver();
}
