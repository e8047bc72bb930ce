#include "bindings/group_communicator.h"

#include <fmt/format.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/collectives/rank_order_sum.h"
#include "engine/collectives/same_call.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using engine::Announcement;
using engine::Call;
using engine::CommunicatorError;

/// Python objects are let go with the GIL, and not at all once there is no interpreter.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  ~Held() {
    if (Py_IsInitialized() == 0) {
      static_cast<void>(object_.release());
      return;
    }
    const py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  const py::object& get() const { return object_; }

 private:
  py::object object_;
};

py::object view(std::span<const std::byte> data) {
  return py::memoryview::from_memory(const_cast<std::byte*>(data.data()),
                                     static_cast<py::ssize_t>(data.size()), false);
}

class GroupCommunicator final : public engine::Communicator {
 public:
  explicit GroupCommunicator(py::object group) : group_(std::move(group)) {
    const py::gil_scoped_acquire gil;
    rank_ = group_.get().attr("rank").cast<int>();
    world_ = group_.get().attr("world").cast<int>();
    said_.resize(world_);
    mine_.resize(world_);
  }

  int rank() const override { return rank_; }
  int world() const override { return world_; }

  void all_gather(std::span<std::byte> data) override {
    const MutexLock turn(turn_);
    announce(Call::all_gather, data.size(), data.size());
    const size_t slice = data.size() / world_;
    const auto at = [&](int rank) { return data.subspan(rank * slice, slice); };
    move(
        Call::all_gather, 1, [&](int, size_t) { return at(rank_); },
        [&](int rank, size_t) { return at(rank); });
  }

  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    const MutexLock turn(turn_);
    announce(Call::all_to_all, send.size(), receive.size());
    const size_t slice = send.size() / world_;
    if (slice > 0) std::memcpy(receive.data() + rank_ * slice, send.data() + rank_ * slice, slice);
    move(
        Call::all_to_all, 1, [&](int rank, size_t) { return send.subspan(rank * slice, slice); },
        [&](int rank, size_t) { return receive.subspan(rank * slice, slice); });
  }

  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    const engine::Exchange one{{send.begin(), send.end()}, {receive.begin(), receive.end()}};
    exchange_together({&one, 1});
  }

  /// As one call: a call through Python costs more time than the bytes of a small unit.
  void exchange_together(std::span<const engine::Exchange> exchanges) override {
    const MutexLock turn(turn_);
    begin(Call::exchange);
    for (int peer = 0; peer < world_; ++peer) {
      mine_[peer] = {calls_, 0, 0, Call::exchange};
      for (const engine::Exchange& one : exchanges) {
        if (one.on_device) throw std::logic_error("a torch.distributed group moves host memory alone");
        mine_[peer].send_bytes += one.send[peer].size();
        mine_[peer].receive_bytes += one.receive[peer].size();
      }
    }
    hear(Call::exchange);
    for (int peer = 0; peer < world_; ++peer) {
      if (peer == rank_) continue;
      check_pair(peer, rank_, said_[peer].send_bytes, mine_[peer].receive_bytes);
      check_pair(rank_, peer, mine_[peer].send_bytes, said_[peer].receive_bytes);
    }
    move(
        Call::exchange, exchanges.size(), [&](int rank, size_t i) { return exchanges[i].send[rank]; },
        [&](int rank, size_t i) { return exchanges[i].receive[rank]; });
  }

  void all_reduce_sum(std::span<double> values) override {
    engine::sum_in_rank_order(*this, values, gathered_);
  }

  /// Whoever has heard announcements of all knows that all are here.
  void barrier() override {
    const MutexLock turn(turn_);
    announce(Call::barrier, 0, 0);
  }

  /// May come while a call is in progress; that one throws then, here as on the other ranks.
  void abort(const char* reason) noexcept override {
    try {
      declare(fmt::format("rank {} aborted: {}", rank_, reason));
      aborted_ = true;
      leave();
    } catch (const std::exception&) {
      aborted_ = true;  // the world ends here at least; the others notice when this process does
    }
  }

 private:
  void begin(Call call) REQUIRES(turn_) {
    throw_if_failed(call);
    if (aborted_) fail(call, fmt::format("rank {} aborted", rank_));
    ++calls_;
  }

  void announce(Call call, uint64_t send_bytes, uint64_t receive_bytes) REQUIRES(turn_) {
    begin(call);
    for (Announcement& to_peer : mine_) to_peer = {calls_, send_bytes, receive_bytes, call};
    hear(call);
  }

  /// Sends each peer what is in mine_, and looks at what they said: one call, the same on all ranks.
  void hear(Call call) REQUIRES(turn_) {
    said_[rank_] = mine_[rank_];
    const std::span mine(mine_), said(said_);
    move(
        call, 1, [&](int rank, size_t) { return std::as_bytes(mine.subspan(rank, 1)); },
        [&](int rank, size_t) { return std::as_writable_bytes(said.subspan(rank, 1)); });
    const auto difference = engine::find_difference(world_, [&](int rank) {
      turn_.assume_held();
      const Announcement& said = said_[rank];
      if (said.call == Call::exchange) return engine::CallShape{name_of(said.call), 0, 0, false};
      return engine::CallShape{name_of(said.call), said.send_bytes, said.receive_bytes, true};
    });
    if (!difference.empty()) fail(call, difference);
    for (int rank = 0; rank < world_; ++rank) {
      if (said_[rank].number != said_[0].number)
        fail(call, fmt::format("rank {} is at call {} where rank 0 is at {}", rank, said_[rank].number,
                               said_[0].number));
    }
  }

  void check_pair(int from, int to, size_t sent, size_t room) REQUIRES(turn_) {
    if (sent != room) fail(Call::exchange, engine::odd_pair(from, to, sent, room));
  }

  /// Bytes from send(peer, i) to each peer, and from each into receive(peer, i), for every i below `count`.
  template <class Send, class Receive>
  void move(Call call, size_t count, Send send, Receive receive) REQUIRES(turn_) {
    if (world_ == 1) return;
    std::string lost;
    try {
      const py::gil_scoped_acquire gil;
      py::list sends, receives;
      bool anything = false;
      for (int peer = 0; peer < world_; ++peer) {
        py::list to, from;
        for (size_t i = 0; i < count && peer != rank_; ++i) {
          if (!send(peer, i).empty()) to.append(view(send(peer, i)));
          if (!receive(peer, i).empty()) from.append(view(receive(peer, i)));
        }
        anything = anything || !to.empty() || !from.empty();
        sends.append(to);
        receives.append(from);
      }
      if (anything) lost = group_.get().attr("exchange")(sends, receives).cast<std::string>();
    } catch (const py::error_already_set& error) {
      lost = fmt::format("rank {}: {}", rank_, error.what());
    }
    if (!lost.empty()) fail(call, lost);
  }

  /// What the world says was first: our reason, unless another rank was faster.
  std::string declare(const std::string& why) {
    const py::gil_scoped_acquire gil;
    return group_.get().attr("declare")(why).cast<std::string>();
  }

  void leave() {
    const py::gil_scoped_acquire gil;
    group_.get().attr("leave")();
  }

  [[noreturn]] void fail(Call call, const std::string& why) REQUIRES(turn_) {
    failure_ = why;
    try {
      failure_ = declare(why);
      leave();
    } catch (const py::error_already_set&) {  // the store is gone: what we saw ourselves has to do
    }
    throw_if_failed(call);
    std::abort();
  }

  void throw_if_failed(Call call) const REQUIRES(turn_) {
    if (!failure_.empty()) throw CommunicatorError(fmt::format("{}: {}", name_of(call), failure_));
  }

  const Held group_;
  int rank_ = 0;
  int world_ = 1;
  Mutex turn_;  // one call at a time; held without the GIL
  uint64_t calls_ GUARDED_BY(turn_) = 0;
  std::vector<Announcement> mine_ GUARDED_BY(turn_), said_ GUARDED_BY(turn_);  // by rank: to it, and from it
  std::vector<double> gathered_;  // of all_reduce_sum, which one thread at a time calls
  std::string failure_ GUARDED_BY(turn_);
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::unique_ptr<engine::Communicator> make_group_communicator(py::object group) {
  return std::make_unique<GroupCommunicator>(std::move(group));
}

}  // namespace overspill::bindings
