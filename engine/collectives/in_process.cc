#include "engine/collectives/in_process.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "base/mutex.h"
#include "cpu_optim/elements.h"
#include "engine/collectives/same_call.h"

namespace overspill::engine {
namespace {

/// What one rank brings to a call. Other ranks read `send` between join() and leave().
struct Offer {
  const char* call = nullptr;  // nullptr: not here yet
  std::span<const std::byte> send;
  size_t receive_bytes = 0;
  bool slices = false;  // whether `send` has to be divisible by the world
  // exchange: by peer.
  std::span<const std::span<const std::byte>> parts;
  std::span<const std::span<std::byte>> rooms;
};

/// A call has two halves. join(): all ranks offer their memory, or all of them throw; leave(): nobody
/// returns, so no memory goes away, before everybody has read. Between the two a rank only copies, so leave()
/// needs no timeout, and an abort waits for it.
class World {
 public:
  World(int ranks, std::chrono::milliseconds timeout)
      : ranks_(ranks), timeout_(timeout), offers_(ranks), gone_(ranks, false) {}

  int ranks() const { return ranks_; }

  void join(int rank, const Offer& offer) {
    const MutexLock lock(mutex_);
    throw_if_failed(offer.call);
    offers_[rank] = offer;
    if (const auto gone = std::ranges::find(gone_, true); gone != gone_.end()) {
      fail(fmt::format("rank {} has left the world", gone - gone_.begin()));
    } else if (++joined_ == ranks()) {
      std::string difference = find_difference(ranks(), [&](int r) {
        mutex_.assume_held();
        return shape_of(r);
      });
      if (difference.empty()) difference = find_odd_offers();
      if (!difference.empty()) {
        fail(difference);
      } else {
        joined_ = 0;
        reading_ = ranks();
        ++calls_;
        changed_.notify_all();
        return;
      }
    } else {
      const uint64_t call = calls_;
      const auto end = std::chrono::steady_clock::now() + timeout_;
      while (calls_ == call && failure_.empty() && changed_.wait_until(mutex_, end)) {
      }
      if (calls_ == call && failure_.empty()) {
        fail(fmt::format("rank {} did not join within {} ms", fmt::join(missing(), ", "), timeout_.count()));
      }
      if (calls_ != call) return;  // complete, whatever failed since
    }
    throw_if_failed(offer.call);
  }

  /// What `rank` offered; between join() and leave() only. Nobody changes it then, so nobody needs the mutex.
  std::span<const std::byte> offered(int rank) const NO_THREAD_SAFETY_ANALYSIS { return offers_[rank].send; }
  std::span<const std::byte> offered(int from, int to) const NO_THREAD_SAFETY_ANALYSIS {
    return offers_[from].parts[to];
  }

  void leave() {
    const MutexLock lock(mutex_);
    const uint64_t call = calls_;
    if (--reading_ == 0) {
      for (Offer& offer : offers_) offer = Offer();
      ++left_;
      changed_.notify_all();
    }
    while (left_ != call) changed_.wait(mutex_);
  }

  void abort(int rank, const char* reason) {
    const MutexLock lock(mutex_);
    fail(fmt::format("rank {} aborted: {}", rank, reason));
  }

  std::string failure() const {
    const MutexLock lock(mutex_);
    return failure_;
  }

  void remove(int rank) {
    const MutexLock lock(mutex_);
    gone_[rank] = true;
    if (joined_ > 0) fail(fmt::format("rank {} has left the world", rank));
  }

 private:
  void fail(const std::string& why) REQUIRES(mutex_) {
    if (failure_.empty()) failure_ = why;
    changed_.notify_all();
  }

  void throw_if_failed(const char* call) const REQUIRES(mutex_) {
    if (!failure_.empty()) throw CommunicatorError(fmt::format("{}: {}", call, failure_));
  }

  CallShape shape_of(int rank) const REQUIRES(mutex_) {
    const Offer& offer = offers_[rank];
    return {offer.call, offer.send.size(), offer.receive_bytes, offer.slices};
  }

  std::string find_odd_offers() const REQUIRES(mutex_) {
    if (offers_[0].parts.empty()) return {};  // no exchange, on any rank
    const auto sent = [&](int from, int to) {
      mutex_.assume_held();
      return offers_[from].parts[to].size();
    };
    const auto room = [&](int from, int to) {
      mutex_.assume_held();
      return offers_[to].rooms[from].size();
    };
    return find_odd_pair(ranks(), sent, room);
  }

  std::vector<int> missing() const REQUIRES(mutex_) {
    std::vector<int> ranks;
    for (int rank = 0; rank < this->ranks(); ++rank) {
      if (offers_[rank].call == nullptr) ranks.push_back(rank);
    }
    return ranks;
  }

  const int ranks_;
  const std::chrono::milliseconds timeout_;
  mutable Mutex mutex_;
  Condition changed_;
  std::vector<Offer> offers_ GUARDED_BY(mutex_);
  std::vector<bool> gone_ GUARDED_BY(mutex_);
  std::string failure_ GUARDED_BY(mutex_);
  int joined_ GUARDED_BY(mutex_) = 0;      // ranks waiting in join()
  int reading_ GUARDED_BY(mutex_) = 0;     // ranks between join() and leave()
  uint64_t calls_ GUARDED_BY(mutex_) = 0;  // complete joins
  uint64_t left_ GUARDED_BY(mutex_) = 0;   // complete leaves
};

class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_(rank) {}
  ~InProcessCommunicator() override { world_->remove(rank_); }

  int rank() const override { return rank_; }
  int world() const override { return world_->ranks(); }

  void all_gather(std::span<std::byte> data) override {
    world_->join(rank_, {"all_gather", data, data.size(), true, {}, {}});
    const size_t slice = data.size() / world();
    for (int from = 0; from < world(); ++from) {
      if (from != rank_)
        copy(world_->offered(from).subspan(from * slice, slice), data.subspan(from * slice, slice));
    }
    world_->leave();
  }

  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    world_->join(rank_, {"all_to_all", send, receive.size(), true, {}, {}});
    const size_t slice = send.size() / world();
    for (int from = 0; from < world(); ++from) {
      copy(world_->offered(from).subspan(rank_ * slice, slice), receive.subspan(from * slice, slice));
    }
    world_->leave();
  }

  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    world_->join(rank_, {"exchange", {}, 0, false, send, receive});
    for (int from = 0; from < world(); ++from) {
      if (from != rank_) copy(world_->offered(from, rank_), receive[from]);
    }
    world_->leave();
  }

  void all_reduce_sum(std::span<double> values) override {
    // Before the join: what may throw must not stand between join() and leave().
    sums_.assign(values.size(), 0.0);
    world_->join(rank_, {"all_reduce_sum", std::as_bytes(values), values.size_bytes(), false, {}, {}});
    for (int from = 0; from < world(); ++from) {
      const auto* addends = reinterpret_cast<const double*>(world_->offered(from).data());
      // The first is taken over, not added to 0.0, which would turn -0.0 into 0.0.
      for (size_t i = 0; i < values.size(); ++i) sums_[i] = from == 0 ? addends[i] : sums_[i] + addends[i];
    }
    world_->leave();
    std::ranges::copy(sums_, values.begin());  // only now: others read `values` until they have left
  }

  /// For tests: in rank order, in fp32, rounded once.
  bool reduces() const override { return true; }

  void reduce_scatter_sum(std::span<const std::byte> send, std::span<std::byte> sum,
                          optim::Element element) override {
    addends_.resize(static_cast<size_t>(whole_elements(sum, element)));
    world_->join(rank_,
                 {"reduce_scatter_sum", send, sum.size() * static_cast<size_t>(world()), true, {}, {}});
    for (int from = 0; from < world(); ++from)
      optim::widen(element, world_->offered(from).data() + rank_ * sum.size(), addends_, from == 0);
    world_->leave();
    optim::narrow(element, addends_, sum.data());
  }

  void barrier() override {
    world_->join(rank_, {"barrier", {}, 0, false, {}, {}});
    world_->leave();
  }

  void abort(const char* reason) noexcept override { world_->abort(rank_, reason); }
  std::string failure() override { return world_->failure(); }

 private:
  static void copy(std::span<const std::byte> from, std::span<std::byte> to) {
    std::ranges::copy(from, to.begin());
  }

  std::shared_ptr<World> world_;
  const int rank_;
  std::vector<double> sums_;
  std::vector<float> addends_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_in_process_world(int ranks,
                                                                 std::chrono::milliseconds timeout) {
  if (ranks < 1) throw CommunicatorError(fmt::format("a world of {} ranks; it has at least one", ranks));
  const auto world = std::make_shared<World>(ranks, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(std::make_unique<InProcessCommunicator>(world, rank));
  }
  return communicators;
}

}  // namespace overspill::engine
