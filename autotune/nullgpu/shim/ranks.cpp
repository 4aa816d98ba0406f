// Exchange between the ranks of a communicator: processes of this machine that share a file.
#include "ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "processes.h"
#include "settings.h"

namespace nullgpu {
namespace {

constexpr int QUEUE = 8;         // messages that a sender may be ahead of a receiver
constexpr long GLANCE_MS = 50;   // how often a waiting rank looks whether the others are alive

thread_local std::string last_problem;

// Each rank posts in turns into one of two places: who posts exchange n has read n - 1 of all, so nobody reads n - 2.
struct Post {
    Call call;
    uint64_t bytes;
};
struct Member {
    Identity who;                 // set before `joined`
    std::atomic<uint32_t> joined;
    std::atomic<uint32_t> left;
    std::atomic<uint64_t> posted;  // exchanges
    Post posts[2];
};
struct Queue {
    std::atomic<uint64_t> sent, received;
    uint64_t bytes[QUEUE];
};

}  // namespace

// The file: this, then two buffers for each rank's posts, then QUEUE buffers for each sender and receiver. It is sparse:
// pages that nobody writes to take no memory.
struct Shared {
    std::atomic<uint32_t> changes;  // a futex: woken after every change
    Member members[MOST_RANKS];
    Queue queues[MOST_RANKS][MOST_RANKS];
};

namespace {

size_t buffer_bytes() { return round_up(settings().copy_max, 4096); }
size_t header_bytes() { return round_up(sizeof(Shared), 4096); }
size_t file_bytes(int size) { return header_bytes() + buffer_bytes() * (size_t(size) * 2 + size_t(size) * size_t(size) * QUEUE); }
char *post_buffer(Shared *shared, int rank, uint64_t turn) {
    return reinterpret_cast<char *>(shared) + header_bytes() + buffer_bytes() * (size_t(rank) * 2 + turn % 2);
}
char *queue_buffer(Shared *shared, int size, int from, int to, uint64_t message) {
    size_t queue = size_t(from) * size_t(size) + size_t(to);
    return post_buffer(shared, size, 0) + buffer_bytes() * (queue * QUEUE + message % QUEUE);
}

void wake(Shared *shared) {
    shared->changes++;
    syscall(SYS_futex, &shared->changes, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}
void sleep_until_change(Shared *shared, uint32_t seen) {
    timespec time = {0, GLANCE_MS * 1000000};
    syscall(SYS_futex, &shared->changes, FUTEX_WAIT, seen, &time, nullptr, 0);
}
double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

}  // namespace

const std::string &problem() { return last_problem; }
int problem_of(int code, const std::string &text) {
    last_problem = text;
    return code;
}

bool Call::operator==(const Call &other) const {
    return !strcmp(name, other.name) && count == other.count && type == other.type && operation == other.operation && root == other.root;
}
std::string Call::text() const {
    std::string text = std::string(name) + " of " + std::to_string(count) + " numbers of type " + std::to_string(type);
    if (root >= 0) text += ", root " + std::to_string(root);
    return text;
}

Ranks::Ranks(Shared *shared, size_t bytes, int size, int rank, const std::string &name)
    : size(size), rank(rank), name(name), shared(shared), mapped(bytes) {}

Ranks::~Ranks() {
    shared->members[rank].left = 1;
    wake(shared);
    munmap(shared, mapped);
}

int Ranks::join(const std::string &name, int size, int rank, Ranks **out) {
    *out = nullptr;
    if (size < 1 || size > MOST_RANKS) return problem_of(NCCL_INVALID_ARGUMENT, "a null GPU has at most " + std::to_string(MOST_RANKS) + " ranks");
    if (rank < 0 || rank >= size) return problem_of(NCCL_INVALID_ARGUMENT, "there is no rank " + std::to_string(rank) + " of " + std::to_string(size));
    std::string path = settings().table + "-nccl-" + name;
    size_t bytes = file_bytes(size);
    int file = settings().alone ? -1 : open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 && !settings().alone) return problem_of(NCCL_SYSTEM_ERROR, path + ": " + strerror(errno));
    if (file >= 0 && ftruncate(file, off_t(bytes)) != 0) return close(file), problem_of(NCCL_SYSTEM_ERROR, path + ": " + strerror(errno));
    int kind = file >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, file, 0);
    if (file >= 0) close(file);
    if (at == MAP_FAILED) return problem_of(NCCL_SYSTEM_ERROR, path + ": " + strerror(errno));
    auto *ranks = new Ranks(static_cast<Shared *>(at), bytes, size, rank, name);
    Member &mine = ranks->shared->members[rank];
    mine.who = this_process();
    mine.joined = 1;
    wake(ranks->shared);
    int code = ranks->wait([&](int peer) { return ranks->shared->members[peer].joined != 0; }, 0, size, "to join");
    // All have it open, or will never have.
    if (!settings().alone) unlink(path.c_str());
    if (code) return delete ranks, code;
    *out = ranks;
    return NCCL_OK;
}

// The rank whose memory stands for a peer's.
int Ranks::together(int peer) const { return settings().alone ? rank : peer; }

int Ranks::failed(int code, const std::string &text) {
    failure = code;
    return problem_of(code, text);
}

// Waits until `reached(peer)` is true of every peer from the first to before the end.
template <typename Condition>
int Ranks::wait(Condition reached, int first_peer, int end_of_peers, const std::string &what) {
    double give_up = now() + settings().patience_seconds;
    for (int peer = first_peer; peer < end_of_peers; peer++) {
        int who = together(peer);
        for (;;) {
            uint32_t seen = shared->changes;
            if (reached(who)) break;
            std::string waiting = "rank " + std::to_string(rank) + " waits for rank " + std::to_string(peer) + " " + what;
            if (aborted) return failed(NCCL_SYSTEM_ERROR, waiting + ", and was aborted");
            const Member &member = shared->members[who];
            // What it did last may have come after the first look.
            if (member.joined && (member.left || !alive(member.who)) && !reached(who))
                return failed(NCCL_REMOTE_ERROR, waiting + ", which has ended (process " + std::to_string(member.who.pid) + ")");
            if (now() > give_up)
                return failed(NCCL_SYSTEM_ERROR, waiting + ", for " + std::to_string(settings().patience_seconds) + " s");
            sleep_until_change(shared, seen);
        }
    }
    return NCCL_OK;
}

int Ranks::exchange(const Call &call, const void *from, size_t bytes, std::vector<const void *> *all) {
    all->clear();
    if (failure) return problem_of(failure, "this communicator has failed before");
    uint64_t turn = ++done;
    Member &mine = shared->members[rank];
    mine.posts[turn % 2] = {call, bytes};
    bool whole = bytes <= settings().copy_max;
    if (whole && bytes) memcpy(post_buffer(shared, rank, turn), from, bytes);
    mine.posted = turn;
    wake(shared);
    int code = wait([&](int peer) { return shared->members[peer].posted >= turn; }, 0, size, "in " + call.text());
    if (code) return code;
    for (int peer = 0; peer < size; peer++) {
        const Post &post = shared->members[together(peer)].posts[turn % 2];
        if (!(post.call == call) || post.bytes != bytes)
            return failed(NCCL_INVALID_USAGE, "rank " + std::to_string(rank) + " is in " + call.text() + ", rank " + std::to_string(peer) + " in " + post.call.text());
        if (whole) all->push_back(post_buffer(shared, together(peer), turn));
    }
    return NCCL_OK;
}

int Ranks::send(int to, const void *from, size_t bytes) {
    if (failure) return problem_of(failure, "this communicator has failed before");
    if (to < 0 || to >= size) return failed(NCCL_INVALID_ARGUMENT, "there is no rank " + std::to_string(to));
    to = together(to);
    Queue &queue = shared->queues[rank][to];
    uint64_t message = queue.sent;
    // Alone, a rank may send what another would receive: the oldest message is dropped.
    if (settings().alone && queue.received + QUEUE <= message) queue.received++;
    int code = wait([&](int) { return queue.received + QUEUE > message; }, to, to + 1, "to receive");
    if (code) return code;
    queue.bytes[message % QUEUE] = bytes;
    if (bytes <= settings().copy_max) memcpy(queue_buffer(shared, size, rank, to, message), from, bytes);
    queue.sent = message + 1;
    wake(shared);
    return NCCL_OK;
}

int Ranks::receive(int from, void *to, size_t bytes) {
    if (failure) return problem_of(failure, "this communicator has failed before");
    if (from < 0 || from >= size) return failed(NCCL_INVALID_ARGUMENT, "there is no rank " + std::to_string(from));
    from = together(from);
    Queue &queue = shared->queues[from][rank];
    uint64_t message = queue.received;
    // Alone, nobody else will send: what was not sent stays what it was.
    if (settings().alone && queue.sent == message) return NCCL_OK;
    int code = wait([&](int) { return queue.sent > message; }, from, from + 1, "to send");
    if (code) return code;
    if (queue.bytes[message % QUEUE] != bytes)
        return failed(NCCL_INVALID_USAGE, "rank " + std::to_string(from) + " sent " + std::to_string(queue.bytes[message % QUEUE]) + " bytes to rank " + std::to_string(rank) + ", which receives " + std::to_string(bytes));
    if (bytes <= settings().copy_max) memcpy(to, queue_buffer(shared, size, from, rank, message), bytes);
    queue.received = message + 1;
    wake(shared);
    return NCCL_OK;
}

}  // namespace nullgpu
