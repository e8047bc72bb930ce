#include "engine/collectives/mpi.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optim/elements.h"
#include "engine/collectives/rank_order_sum.h"
#include "engine/collectives/same_call.h"
#include "io/say.h"

namespace overspill::engine {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kAnnounceTag = 1;
constexpr int kVerdictTag = 2;
constexpr int kDataTag = 3;
constexpr size_t kBlock = 64;  // bytes counted as one, where a slice has more than an int can count

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommunicatorError(fmt::format("{}: {}", call, std::string_view(text.data(), length)));
}

/// MPI knows no halves: they travel as words of 16 bits, and are added by us, rounded after each addition.
template <optim::Element element>
void add(void* from, void* to, int* count, MPI_Datatype*) {
  optim::accumulate(element, from, static_cast<std::byte*>(to), *count);
}

MPI_Datatype type_of(optim::Element element) {
  return element == optim::Element::fp32 ? MPI_FLOAT : MPI_UINT16_T;
}

/// What a rank says when it has heard all announcements: nothing, or why the world ends.
using Verdict = std::array<char, 512>;

/// A slice as MPI counts it.
class SliceType {
 public:
  explicit SliceType(size_t bytes) {
    constexpr size_t most = std::numeric_limits<int>::max();
    if (bytes <= most) {
      count_ = static_cast<int>(bytes);
    } else if (bytes % kBlock == 0 && bytes / kBlock <= most) {
      count_ = static_cast<int>(bytes / kBlock);
      check(MPI_Type_contiguous(kBlock, MPI_BYTE, &type_), "MPI_Type_contiguous");
      check(MPI_Type_commit(&type_), "MPI_Type_commit");
    } else {
      throw CommunicatorError(fmt::format("a slice of {} bytes is more than MPI can count", bytes));
    }
  }
  ~SliceType() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  SliceType(const SliceType&) = delete;
  SliceType& operator=(const SliceType&) = delete;
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<bool> world_failed, std::chrono::milliseconds timeout)
      : world_failed_(std::move(world_failed)), timeout_(timeout) {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &ranks_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(ranks_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(ranks_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(ranks_, &world_), "MPI_Comm_size");
    check(MPI_Op_create(add<optim::Element::bf16>, 1, &add_bf16_), "MPI_Op_create");
    check(MPI_Op_create(add<optim::Element::fp16>, 1, &add_fp16_), "MPI_Op_create");
    heard_.resize(world_);
    verdicts_.resize(world_);
    for (auto* requests : {&hears_, &hears_verdict_, &says_, &says_verdict_})
      requests->assign(world_, MPI_REQUEST_NULL);
  }

  ~MpiCommunicator() override {
    // After a failure some of these never end. Cancelled, none looks at this object's memory later on.
    for (auto* requests : {&hears_, &hears_verdict_, &says_, &says_verdict_}) {
      for (MPI_Request& request : *requests) {
        if (request == MPI_REQUEST_NULL) continue;
        MPI_Cancel(&request);
        MPI_Request_free(&request);
      }
    }
    MPI_Op_free(&add_bf16_);
    MPI_Op_free(&add_fp16_);
    if (failure_.empty()) MPI_Comm_free(&ranks_);  // collective, so not in a world that has ended
  }

  int rank() const override { return rank_; }
  int world() const override { return world_; }

  void all_gather(std::span<std::byte> data) override {
    announce(Call::all_gather, data.size(), data.size());
    const SliceType slice(data.size() / world_);
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Iallgather(MPI_IN_PLACE, 0, slice.type(), data.data(), slice.count(), slice.type(), ranks_,
                         &request),
          "MPI_Iallgather");
    finish(request, Call::all_gather);
  }

  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    announce(Call::all_to_all, send.size(), receive.size());
    const SliceType slice(send.size() / world_);
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ialltoall(send.data(), slice.count(), slice.type(), receive.data(), slice.count(), slice.type(),
                        ranks_, &request),
          "MPI_Ialltoall");
    finish(request, Call::all_to_all);
  }

  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    const Exchange one{{send.begin(), send.end()}, {receive.begin(), receive.end()}};
    exchange_together({&one, 1});
  }

  /// Messages of a pair of ranks arrive in the order in which they were sent, so one tag is enough.
  void exchange_together(std::span<const Exchange> exchanges) override {
    announce(Call::exchange, 0, 0);  // what is sent differs from pair to pair
    std::vector<MPI_Request> requests;
    for (const Exchange& one : exchanges) {
      if (one.on_device) throw std::logic_error("MPI moves host memory alone");
      for_peers([&](int peer) {
        if (one.receive[peer].empty()) return;
        const SliceType slice(one.receive[peer].size());
        check(MPI_Irecv(one.receive[peer].data(), slice.count(), slice.type(), peer, kDataTag, ranks_,
                        &requests.emplace_back()),
              "MPI_Irecv");
      });
    }
    const size_t received = requests.size();
    for (const Exchange& one : exchanges) {
      for_peers([&](int peer) {
        if (one.send[peer].empty()) return;
        const SliceType slice(one.send[peer].size());
        check(MPI_Isend(one.send[peer].data(), slice.count(), slice.type(), peer, kDataTag, ranks_,
                        &requests.emplace_back()),
              "MPI_Isend");
      });
    }
    size_t next = 0;
    for (const Exchange& one : exchanges) {
      for_peers([&](int peer) {
        if (!one.receive[peer].empty()) finish_received(requests[next++], peer, one.receive[peer].size());
      });
    }
    for (size_t i = received; i < requests.size(); ++i) finish(requests[i], Call::exchange);
  }

  void all_reduce_sum(std::span<double> values) override { sum_in_rank_order(*this, values, gathered_); }

  bool reduces() const override { return true; }

  void reduce_scatter_sum(std::span<const std::byte> send, std::span<std::byte> sum,
                          optim::Element element) override {
    const int64_t elements = whole_elements(sum, element);
    announce(Call::reduce_scatter_sum, send.size(), sum.size() * static_cast<size_t>(world_));
    if (elements > std::numeric_limits<int>::max())
      throw CommunicatorError(fmt::format("a sum of {} elements is more than MPI can count", elements));
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ireduce_scatter_block(send.data(), sum.data(), static_cast<int>(elements), type_of(element),
                                    sum_of(element), ranks_, &request),
          "MPI_Ireduce_scatter_block");
    finish(request, Call::reduce_scatter_sum);
  }

  void barrier() override { announce(Call::barrier, 0, 0); }

  void abort(const char* reason) noexcept override {
    try {
      fail(fmt::format("rank {} aborted: {}", rank_, reason));
    } catch (const std::exception&) {
      MPI_Abort(ranks_, 1);
    }
  }

  /// Between calls every verdict of the last one has come, so a message that is there now ends the world.
  std::string failure() override {
    for_peers([&](int peer) {
      int there = 0, bytes = 0;
      MPI_Status status;
      if (!failure_.empty()) return;
      check(MPI_Iprobe(peer, kVerdictTag, ranks_, &there, &status), "MPI_Iprobe");
      if (there == 0) return;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      check(MPI_Recv(verdicts_[peer].data(), sizeof(Verdict), MPI_BYTE, peer, kVerdictTag, ranks_,
                     MPI_STATUS_IGNORE),
            "MPI_Recv");
      failed_with({verdicts_[peer].data(), static_cast<size_t>(bytes)});
    });
    return failure_;
  }

 private:
  MPI_Op sum_of(optim::Element element) const {
    if (element == optim::Element::fp32) return MPI_SUM;
    return element == optim::Element::bf16 ? add_bf16_ : add_fp16_;
  }

  /// Returns when every rank has said that it makes this call, and that it has heard so of all others; a
  /// barrier, therefore. In between nobody gives up without a verdict, so either all ranks go on or none
  /// does.
  void announce(Call call, uint64_t send_bytes, uint64_t receive_bytes) {
    throw_if_failed(call);
    heard_[rank_] = mine_ = {++calls_, send_bytes, receive_bytes, call};
    for_peers([&](int peer) {
      receive(&heard_[peer], sizeof(Announcement), peer, kAnnounceTag, hears_[peer]);
      receive(verdicts_[peer].data(), sizeof(Verdict), peer, kVerdictTag, hears_verdict_[peer]);
      send(&mine_, sizeof(Announcement), peer, kAnnounceTag, says_[peer]);
    });
    if (!wait_for(hears_))
      fail(fmt::format("rank {} did not join within {} ms", missing(hears_), timeout_.count()));
    throw_if_failed(call);
    if (const auto difference = find_difference(world_, [&](int r) { return shape_of(r); });
        !difference.empty())
      fail(difference);
    for_peers([&](int peer) {
      if (heard_[peer].number != calls_)
        fail(fmt::format("rank {} is at call {} where rank {} is at {}", peer, heard_[peer].number, rank_,
                         calls_));
    });
    throw_if_failed(call);
    for_peers([&](int peer) { send(nullptr, 0, peer, kVerdictTag, says_verdict_[peer]); });
    if (!wait_for(hears_verdict_))
      fail(fmt::format("rank {} joined, and was not heard of for {} ms", missing(hears_verdict_),
                       timeout_.count()));
    throw_if_failed(call);
    if (!wait_for(says_) || !wait_for(says_verdict_)) fail("MPI keeps messages that were received");
    throw_if_failed(call);
  }

  CallShape shape_of(int rank) const {
    const Announcement& said = heard_[rank];
    return {name_of(said.call), said.send_bytes, said.receive_bytes, true};
  }

  template <typename Function>
  void for_peers(const Function& function) const {
    for (int peer = 0; peer < world_; ++peer) {
      if (peer != rank_) function(peer);
    }
  }

  void receive(void* data, int bytes, int peer, int tag, MPI_Request& request) {
    check(MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, ranks_, &request), "MPI_Irecv");
  }
  void send(const void* data, int bytes, int peer, int tag, MPI_Request& request) {
    check(MPI_Isend(data, bytes, MPI_BYTE, peer, tag, ranks_, &request), "MPI_Isend");
  }

  /// True when all are done or a verdict ended the world, false when `timeout` has passed.
  bool wait_for(std::vector<MPI_Request>& requests) {
    return poll([&] {
      hear_verdicts();
      if (!failure_.empty()) return true;
      bool all = true;
      for (MPI_Request& request : requests) all &= is_done(request);
      return all;
    });
  }

  template <typename Condition>
  bool poll(const Condition& condition) const {
    const auto give_up = Clock::now() + timeout_;
    for (int tries = 0; !condition(); ++tries) {
      if (Clock::now() >= give_up) return false;
      // At first as fast as can be; then the processor belongs to those that are waited for.
      if (tries > 200) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

  static bool is_done(MPI_Request& request) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  }

  void hear_verdicts() {
    for_peers([&](int peer) {
      if (hears_verdict_[peer] == MPI_REQUEST_NULL) return;
      int done = 0, bytes = 0;
      MPI_Status status;
      check(MPI_Test(&hears_verdict_[peer], &done, &status), "MPI_Test");
      if (done == 0) return;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      if (bytes > 0 && failure_.empty()) failed_with({verdicts_[peer].data(), static_cast<size_t>(bytes)});
    });
  }

  void finish_received(MPI_Request request, int peer, size_t bytes) {
    MPI_Status status;
    const bool done = poll([&] {
      int yes = 0;
      check(MPI_Test(&request, &yes, &status), "exchange");
      return yes != 0;
    });
    if (!done) give_up(Call::exchange);
    MPI_Count came = 0;
    check(MPI_Get_elements_x(&status, MPI_BYTE, &came), "MPI_Get_elements_x");
    if (static_cast<size_t>(came) == bytes) return;
    fail(odd_pair(peer, rank_, static_cast<uint64_t>(came), bytes));
    throw_if_failed(Call::exchange);
  }

  void finish(MPI_Request request, Call call) {
    if (!poll([&] { return is_done(request); })) give_up(call);
  }

  [[noreturn]] void give_up(Call call) {
    io::say_on_stderr(
        fmt::format("overspill: rank {}: all ranks began {}, and MPI did not finish it within {} ms", rank_,
                    name_of(call), timeout_.count()));
    MPI_Abort(ranks_, 1);
    std::abort();
  }

  /// The ranks of which nothing has come, as text.
  static std::string missing(std::vector<MPI_Request>& requests) {
    std::vector<size_t> ranks;
    for (size_t peer = 0; peer < requests.size(); ++peer) {
      if (!is_done(requests[peer])) ranks.push_back(peer);
    }
    return fmt::format("{}", fmt::join(ranks, ", "));
  }

  /// Ends the world, and tells the others why.
  void fail(const std::string& why) {
    if (!failure_.empty()) return;
    failed_with(why);
    const size_t bytes = why.copy(last_words_.data(), last_words_.size());
    for_peers([&](int peer) {
      if (says_verdict_[peer] != MPI_REQUEST_NULL) MPI_Request_free(&says_verdict_[peer]);  // of no bytes
      send(last_words_.data(), static_cast<int>(bytes), peer, kVerdictTag, says_verdict_[peer]);
    });
  }

  void failed_with(std::string why) {
    failure_ = std::move(why);
    *world_failed_ = true;
  }

  void throw_if_failed(Call call) const {
    if (!failure_.empty()) throw CommunicatorError(fmt::format("{}: {}", name_of(call), failure_));
  }

  const std::shared_ptr<bool> world_failed_;
  const std::chrono::milliseconds timeout_;
  MPI_Comm ranks_ = MPI_COMM_NULL;
  MPI_Op add_bf16_ = MPI_OP_NULL, add_fp16_ = MPI_OP_NULL;
  int rank_ = 0;
  int world_ = 1;
  uint64_t calls_ = 0;
  Announcement mine_;
  // By rank, our own place unused.
  std::vector<Announcement> heard_;
  std::vector<Verdict> verdicts_;
  std::vector<MPI_Request> hears_, hears_verdict_, says_, says_verdict_;
  std::vector<double> gathered_;
  std::string failure_;
  Verdict last_words_{};
};

}  // namespace

MpiSession::MpiSession() {
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  int level = MPI_THREAD_SINGLE;
  if (initialised != 0) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread");
    initialised_here_ = true;
  }
  if (level >= MPI_THREAD_SERIALIZED) return;
  if (initialised_here_) MPI_Finalize();
  throw CommunicatorError("MPI has no thread level MPI_THREAD_SERIALIZED, which the engine's threads need");
}

MpiSession::~MpiSession() {
  if (initialised_here_ && !*failed_) MPI_Finalize();
}

std::unique_ptr<Communicator> MpiSession::make_communicator(std::chrono::milliseconds timeout) {
  return std::make_unique<MpiCommunicator>(failed_, timeout);
}

}  // namespace overspill::engine
