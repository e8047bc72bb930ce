#include "tests/engine/fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optim/elements.h"
#include "engine/collectives/nccl_library.h"
#include "kernels/simulated_device.h"

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22703
#endif
#define FAKE_NCCL_API extern "C" __attribute__((visibility("default")))

namespace overspill::engine::nccl {

using fake_nccl::Fault;

/// All ranks that share an id. Device memory is read and written under the mutex, and posts of a rank that
/// has aborted are gone, so nobody reads memory that was given back.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  int finalized = 0;
  struct Post {
    const void* data = nullptr;
    size_t bytes = 0;
    bool* taken = nullptr;
  };
  struct Meeting {
    std::map<int, Post> posts;  // by rank
    int read = 0;
  };
  std::map<uint64_t, Meeting> meetings;                  // of all ranks, by number
  std::map<std::pair<int, int>, std::deque<Post>> sent;  // by (from, to)
};

struct Operation {  // of a group
  bool send = false;
  void* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

struct OpaqueComm {
  std::shared_ptr<World> world;
  int ranks = 0;
  int rank = 0;
  bool joined = false;
  bool aborted = false;  // guarded by the world's mutex
  bool finalized = false;
  Result error = Result::success;
  int polls_to_go = 0;           // until the next state
  std::function<void()> launch;  // what then goes to the stream
  std::vector<Operation> group;  // of the group being made
  void* stream = nullptr;        // of the group
  uint64_t meetings = 0;
};

namespace {

constexpr int kPolls = 3;

struct Faults {
  std::mutex mutex;
  Fault fault = Fault::none;
  int rank = -1;
  int calls_to_go = 0;
};
Faults faults;
std::mutex worlds_mutex;
std::map<std::string, std::weak_ptr<World>> worlds;
std::set<Comm> comms;  // live
std::atomic<int64_t> misuse_count = 0;
std::atomic<int64_t> call_count = 0;
std::atomic<int64_t> ids = 0;
thread_local int group_depth = 0;
thread_local Comm group_comm = nullptr;

Fault fault_of(int rank, bool init) {
  const std::lock_guard lock(faults.mutex);
  const bool of_init = faults.fault == Fault::error_at_init || faults.fault == Fault::never_joins;
  if (faults.fault == Fault::none || faults.rank != rank || of_init != init) return Fault::none;
  return faults.calls_to_go-- == 0 ? faults.fault : Fault::none;
}

bool alive(Comm comm) {
  const std::lock_guard lock(worlds_mutex);
  if (comms.contains(comm)) return true;
  ++misuse_count;
  return false;
}

/// Work on the stream keeps what it needs of the communicator beyond its end.
using Keep = std::shared_ptr<OpaqueComm>;
std::map<Comm, Keep> keeps;  // guarded by worlds_mutex

Keep keep(Comm comm) {
  const std::lock_guard lock(worlds_mutex);
  return keeps.at(comm);
}

void forget(Comm comm) {
  const Keep last = keep(comm);  // freed without the lock
  const std::lock_guard lock(worlds_mutex);
  comms.erase(comm);
  keeps.erase(comm);
  last->launch = {};  // it may hold the communicator
}

template <class Condition>
bool wait_unless_aborted(const Keep& comm, std::unique_lock<std::mutex>& lock, const Condition& condition) {
  comm->world->changed.wait(lock, [&] { return comm->aborted || condition(); });
  return !comm->aborted;
}

void hang(const Keep& comm) {
  std::unique_lock lock(comm->world->mutex);
  wait_unless_aborted(comm, lock, [] { return false; });
}

/// All ranks post `bytes` at `send`; each reads what every rank posted, by read(rank, data), in rank order.
template <class Read>
void meet(const Keep& comm, uint64_t number, const void* send, size_t bytes, const Read& read) {
  World& world = *comm->world;
  std::unique_lock lock(world.mutex);
  if (comm->aborted) return;
  auto& meeting = world.meetings[number];
  meeting.posts[comm->rank] = {send, bytes, nullptr};
  world.changed.notify_all();
  if (!wait_unless_aborted(comm, lock, [&] { return std::ssize(meeting.posts) == comm->ranks; })) return;
  for (const auto& [rank, post] : meeting.posts) {
    if (post.bytes != bytes) {
      ++misuse_count;
      wait_unless_aborted(comm, lock, [] { return false; });
      return;
    }
    read(rank, static_cast<const std::byte*>(post.data));
  }
  ++meeting.read;
  world.changed.notify_all();
  wait_unless_aborted(comm, lock, [&] { return meeting.read == comm->ranks; });
}

void gather(const Keep& comm, uint64_t number, const void* send, void* receive, size_t bytes) {
  meet(comm, number, send, bytes, [&](int rank, const std::byte* data) {
    std::byte* const to = static_cast<std::byte*>(receive) + static_cast<size_t>(rank) * bytes;
    if (to != data) std::memcpy(to, data, bytes);
  });
}

/// From the last rank to the first, so that nobody can rely on an order.
void reduce_scatter(const Keep& comm, uint64_t number, const void* send, std::byte* sum, size_t count,
                    optim::Element element) {
  const size_t bytes = count * static_cast<size_t>(optim::bytes(element));
  std::vector<const std::byte*> slices;
  meet(comm, number, send, bytes * static_cast<size_t>(comm->ranks), [&](int rank, const std::byte* data) {
    slices.push_back(data + static_cast<size_t>(comm->rank) * bytes);
    if (rank + 1 < comm->ranks) return;
    std::vector<float> total(count);
    for (size_t i = slices.size(); i-- > 0;) optim::widen(element, slices[i], total, i + 1 == slices.size());
    optim::narrow(element, total, sum);
  });
}

void transfer(const Keep& comm, const std::vector<Operation>& group) {
  World& world = *comm->world;
  std::unique_lock lock(world.mutex);
  if (comm->aborted) return;
  std::deque<bool> taken(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    if (!group[i].send) continue;
    world.sent[{comm->rank, group[i].peer}].push_back({group[i].data, group[i].bytes, &taken[i]});
  }
  world.changed.notify_all();
  for (const Operation& operation : group) {
    if (operation.send) continue;
    auto& posts = world.sent[{operation.peer, comm->rank}];
    if (!wait_unless_aborted(comm, lock, [&] { return !posts.empty(); })) return;
    if (posts.front().bytes != operation.bytes) {
      ++misuse_count;
      wait_unless_aborted(comm, lock, [] { return false; });
      return;
    }
    std::memcpy(operation.data, posts.front().data, operation.bytes);
    *posts.front().taken = true;
    posts.pop_front();
    world.changed.notify_all();
  }
  for (size_t i = 0; i < group.size(); ++i) {
    if (group[i].send && !wait_unless_aborted(comm, lock, [&] { return taken[i]; })) return;
  }
}

/// The work goes to the stream when the state is asked for the third time from now.
Result begin(Comm comm, void* stream, std::function<void()> work) {
  ++call_count;
  const Keep kept = keep(comm);
  const Fault fault = fault_of(comm->rank, false);
  if (fault == Fault::hangs_on_the_device || fault == Fault::error_later) work = [kept] { hang(kept); };
  comm->polls_to_go = fault == Fault::never_begins ? -1 : kPolls;
  comm->launch = [comm, stream, fault, work = std::move(work)] {
    static_cast<kernels::SimulatedQueue*>(stream)->enqueue(work);
    if (fault == Fault::error_later) comm->error = Result::system_error;
  };
  return Result::in_progress;
}

void abort_in_world(const Keep& comm) {
  const std::lock_guard lock(comm->world->mutex);
  comm->aborted = true;
  for (auto& [pair, posts] : comm->world->sent) {
    if (pair.first == comm->rank) posts.clear();
  }
  for (auto& [number, meeting] : comm->world->meetings) {
    if (meeting.read < comm->ranks) meeting.posts.erase(comm->rank);
  }
  comm->world->changed.notify_all();
}

const fake_nccl::Controls controls = {[](Fault fault, int rank, int calls) {
                                        const std::lock_guard lock(faults.mutex);
                                        faults.fault = fault;
                                        faults.rank = rank;
                                        faults.calls_to_go = calls;
                                      },
                                      [] {
                                        const std::lock_guard lock(worlds_mutex);
                                        return static_cast<int64_t>(comms.size());
                                      },
                                      [] { return misuse_count.load(); }, [] { return call_count.load(); }};

}  // namespace

FAKE_NCCL_API const fake_nccl::Controls* fake_nccl_controls() {
  return &controls;
}

FAKE_NCCL_API Result ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return Result::success;
}

FAKE_NCCL_API Result ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof *id);
  std::to_string(++ids).copy(id->internal, sizeof id->internal - 1);
  return Result::success;
}

FAKE_NCCL_API Result ncclCommInitRankConfig(Comm* comm, int ranks, UniqueId id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->size != sizeof(Config) || config->blocking != 0)
    return Result::invalid_argument;
  const Fault fault = fault_of(rank, true);
  if (fault == Fault::error_at_init) return Result::system_error;
  const std::lock_guard lock(worlds_mutex);
  auto& known = worlds[id.internal];
  auto world = known.lock();
  if (world == nullptr) known = world = std::make_shared<World>();
  auto made = std::make_shared<OpaqueComm>();
  made->world = world;
  made->ranks = ranks;
  made->rank = rank;
  *comm = made.get();
  comms.insert(*comm);
  keeps.emplace(*comm, made);
  if (fault == Fault::never_joins) return Result::in_progress;
  const std::lock_guard world_lock(world->mutex);
  ++world->joined;
  return Result::in_progress;
}

FAKE_NCCL_API Result ncclCommGetAsyncError(Comm comm, Result* state) {
  if (!alive(comm)) return Result::invalid_argument;
  if (!comm->joined) {
    const std::lock_guard lock(comm->world->mutex);
    comm->joined = comm->world->joined == comm->ranks;
    *state = Result::in_progress;
    return Result::success;
  }
  if (comm->polls_to_go != 0 && --comm->polls_to_go == 0 && comm->launch) std::exchange(comm->launch, {})();
  bool waits = comm->polls_to_go != 0;
  if (comm->finalized) {  // together with the others
    const std::lock_guard lock(comm->world->mutex);
    waits = waits || comm->world->finalized < comm->ranks;
  }
  *state = waits ? Result::in_progress : comm->error;
  return Result::success;
}

FAKE_NCCL_API Result ncclCommFinalize(Comm comm) {
  if (!alive(comm)) return Result::invalid_argument;
  comm->finalized = true;
  comm->polls_to_go = kPolls;
  const std::lock_guard lock(comm->world->mutex);
  ++comm->world->finalized;
  return Result::in_progress;
}

FAKE_NCCL_API Result ncclCommDestroy(Comm comm) {
  if (!alive(comm)) return Result::invalid_argument;
  if (!comm->finalized || comm->polls_to_go != 0) ++misuse_count;
  forget(comm);
  return Result::success;
}

FAKE_NCCL_API Result ncclCommAbort(Comm comm) {
  if (!alive(comm)) return Result::invalid_argument;
  abort_in_world(keep(comm));
  forget(comm);
  return Result::success;
}

#ifdef FAKE_NCCL_WITHOUT_ALL_GATHER
#define ncclAllGather ncclAllGatherByAnotherName
#endif
FAKE_NCCL_API Result ncclAllGather(const void* send, void* receive, size_t count, DataType, Comm comm,
                                   CudaStream stream) {
  if (!alive(comm)) return Result::invalid_argument;
  return begin(comm, stream, [kept = keep(comm), number = comm->meetings++, send, receive, count] {
    gather(kept, number, send, receive, count);
  });
}

FAKE_NCCL_API Result ncclReduceScatter(const void* send, void* receive, size_t count, DataType type,
                                       Reduction reduction, Comm comm, CudaStream stream) {
  if (!alive(comm) || reduction != Reduction::sum) return Result::invalid_argument;
  const optim::Element element = type == DataType::bfloat16  ? optim::Element::bf16
                                 : type == DataType::float16 ? optim::Element::fp16
                                                             : optim::Element::fp32;
  return begin(comm, stream, [kept = keep(comm), number = comm->meetings++, send, receive, count, element] {
    reduce_scatter(kept, number, send, static_cast<std::byte*>(receive), count, element);
  });
}

FAKE_NCCL_API Result ncclGroupStart() {
  ++group_depth;
  return Result::success;
}

FAKE_NCCL_API Result ncclSend(const void* data, size_t count, DataType, int peer, Comm comm,
                              CudaStream stream) {
  if (!alive(comm) || group_depth != 1) return Result::invalid_argument;
  comm->group.push_back({true, const_cast<void*>(data), count, peer});
  comm->stream = stream;
  group_comm = comm;
  return Result::in_progress;
}

FAKE_NCCL_API Result ncclRecv(void* data, size_t count, DataType, int peer, Comm comm, CudaStream stream) {
  if (!alive(comm) || group_depth != 1) return Result::invalid_argument;
  comm->group.push_back({false, data, count, peer});
  comm->stream = stream;
  group_comm = comm;
  return Result::in_progress;
}

FAKE_NCCL_API Result ncclGroupEnd() {
  --group_depth;
  const Comm comm = std::exchange(group_comm, nullptr);
  if (comm == nullptr) return Result::success;
  return begin(comm, comm->stream,
               [kept = keep(comm), group = std::exchange(comm->group, {})] { transfer(kept, group); });
}

FAKE_NCCL_API const char* ncclGetErrorString(Result result) {
  switch (result) {
    case Result::success:
      return "no error";
    case Result::system_error:
      return "unhandled system error";
    case Result::invalid_argument:
      return "invalid argument";
    case Result::in_progress:
      return "in progress";
  }
  return "unknown";
}

FAKE_NCCL_API const char* ncclGetLastError(Comm) {
  return "the cable was pulled";
}

}  // namespace overspill::engine::nccl
