#include "bindings/group_communicator.h"

#include <fmt/format.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/collectives/rank_order_sum.h"
#include "engine/collectives/same_call.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using engine::CommunicatorError;

enum class Call : uint64_t { all_gather, all_to_all, barrier };

const char* name_of(Call call) {
  switch (call) {
    case Call::all_gather:
      return "all_gather";
    case Call::all_to_all:
      return "all_to_all";
    case Call::barrier:
      return "barrier";
  }
  return "an unknown call";
}

/// What ranks send one another before a call.
struct Announcement {
  uint64_t number = 0;  // of calls so far
  uint64_t send_bytes = 0;
  uint64_t receive_bytes = 0;
  Call call = Call::barrier;
};

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

py::object view(const std::byte* data, size_t bytes) {
  if (bytes == 0) return py::none();
  return py::memoryview::from_memory(const_cast<std::byte*>(data), static_cast<py::ssize_t>(bytes), false);
}

class GroupCommunicator final : public engine::Communicator {
 public:
  explicit GroupCommunicator(py::object group) : group_(std::move(group)) {
    const py::gil_scoped_acquire gil;
    rank_ = group_.get().attr("rank").cast<int>();
    world_ = group_.get().attr("world").cast<int>();
    said_.resize(world_);
  }

  int rank() const override { return rank_; }
  int world() const override { return world_; }

  void all_gather(std::span<std::byte> data) override {
    const std::lock_guard turn(turn_);
    announce(Call::all_gather, data.size(), data.size());
    const size_t slice = data.size() / world_;
    const auto at = [&](int rank) { return data.data() + rank * slice; };
    exchange(
        Call::all_gather, slice, [&](int) { return at(rank_); }, at);
  }

  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    const std::lock_guard turn(turn_);
    announce(Call::all_to_all, send.size(), receive.size());
    const size_t slice = send.size() / world_;
    if (slice > 0) std::memcpy(receive.data() + rank_ * slice, send.data() + rank_ * slice, slice);
    exchange(
        Call::all_to_all, slice, [&](int rank) { return send.data() + rank * slice; },
        [&](int rank) { return receive.data() + rank * slice; });
  }

  void all_reduce_sum(std::span<double> values) override {
    engine::sum_in_rank_order(*this, values, gathered_);
  }

  /// Whoever has heard announcements of all knows that all are here.
  void barrier() override {
    const std::lock_guard turn(turn_);
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
  void announce(Call call, uint64_t send_bytes, uint64_t receive_bytes) {
    throw_if_failed(call);
    if (aborted_) fail(call, fmt::format("rank {} aborted", rank_));
    said_[rank_] = mine_ = {++calls_, send_bytes, receive_bytes, call};
    const auto bytes_of = [](Announcement& said) { return reinterpret_cast<std::byte*>(&said); };
    exchange(
        call, sizeof mine_, [&](int) { return bytes_of(mine_); },
        [&](int rank) { return bytes_of(said_[rank]); });
    const auto difference = engine::find_difference(world_, [&](int rank) {
      const Announcement& said = said_[rank];
      return engine::CallShape{name_of(said.call), said.send_bytes, said.receive_bytes, true};
    });
    if (!difference.empty()) fail(call, difference);
    for (int rank = 0; rank < world_; ++rank) {
      if (said_[rank].number != said_[0].number)
        fail(call, fmt::format("rank {} is at call {} where rank 0 is at {}", rank, said_[rank].number,
                               said_[0].number));
    }
  }

  /// `bytes` from send(peer) to each peer, and from each into receive(peer).
  template <class Send, class Receive>
  void exchange(Call call, size_t bytes, Send send, Receive receive) {
    if (bytes == 0 || world_ == 1) return;
    std::string lost;
    try {
      const py::gil_scoped_acquire gil;
      py::list sends, receives;
      for (int peer = 0; peer < world_; ++peer) {
        sends.append(peer == rank_ ? py::none() : view(send(peer), bytes));
        receives.append(peer == rank_ ? py::none() : view(receive(peer), bytes));
      }
      lost = group_.get().attr("exchange")(sends, receives).cast<std::string>();
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

  [[noreturn]] void fail(Call call, const std::string& why) {
    failure_ = why;
    try {
      failure_ = declare(why);
      leave();
    } catch (const py::error_already_set&) {  // the store is gone: what we saw ourselves has to do
    }
    throw_if_failed(call);
    std::abort();
  }

  void throw_if_failed(Call call) const {
    if (!failure_.empty()) throw CommunicatorError(fmt::format("{}: {}", name_of(call), failure_));
  }

  const Held group_;
  int rank_ = 0;
  int world_ = 1;
  std::mutex turn_;  // one call at a time; held without the GIL
  uint64_t calls_ = 0;
  Announcement mine_;
  std::vector<Announcement> said_;  // by rank
  std::vector<double> gathered_;
  std::string failure_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::unique_ptr<engine::Communicator> make_group_communicator(py::object group) {
  return std::make_unique<GroupCommunicator>(std::move(group));
}

}  // namespace overspill::bindings
