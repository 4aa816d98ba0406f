// Exchange between the ranks of a communicator: processes of this machine that share a file.
//
// Every collective is one exchange: each rank posts what it does and its bytes, waits until all have posted, and reads
// what they posted. A point-to-point message goes into a queue of its sender and receiver. Bytes up to NULLGPU_COPY_MAX
// go along; more only synchronise. Where NULLGPU_ALONE is set, this process is taken for every rank.
//
// Functions return a code of NCCL; a rank that has ended, or does something else, is an error at once, one that does
// not come is an error after NULLGPU_PATIENCE seconds. `problem()` says what was wrong.
#pragma once
#include <atomic>
#include <string>
#include <vector>

#include "common.h"

namespace nullgpu {

// ncclResult_t
enum NcclCode : int { NCCL_OK = 0, NCCL_SYSTEM_ERROR = 2, NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5, NCCL_REMOTE_ERROR = 6 };

// What a rank takes part in. All ranks of an exchange post an equal one, apart from the bytes.
struct Call {
    char name[32];
    uint64_t count;
    int type, operation, root;
    bool operator==(const Call &other) const;
    std::string text() const;
};

constexpr int MOST_RANKS = 64;
struct Shared;  // the file's content

class Ranks {
  public:
    // Joins the communicator of a name, which all its ranks have from ncclGetUniqueId; waits for the others.
    static int join(const std::string &name, int size, int rank, Ranks **out);
    ~Ranks();

    const int size, rank;
    const std::string name;

    // Posts `bytes` at `from`; afterwards (*all)[r] points at what rank r posted, until the exchange after the next. It is
    // empty where the bytes of this call were too many to go along.
    int exchange(const Call &call, const void *from, size_t bytes, std::vector<const void *> *all);

    int send(int to, const void *from, size_t bytes);
    int receive(int from, void *to, size_t bytes);

    // Ends every wait of this rank with an error, from any thread.
    void abort() { aborted = true; }
    int error() const { return failure; }

    uint64_t exchanges() const { return done; }

  private:
    Ranks(Shared *shared, size_t bytes, int size, int rank, const std::string &name);
    template <typename Condition>
    int wait(Condition reached, int first_peer, int end_of_peers, const std::string &what);
    int failed(int code, const std::string &text);
    int together(int peer) const;

    Shared *const shared;
    const size_t mapped;
    uint64_t done = 0;
    std::atomic<bool> aborted{false};
    std::atomic<int> failure{0};
};

// Of this thread: what was wrong last.
const std::string &problem();
int problem_of(int code, const std::string &text);

}  // namespace nullgpu
