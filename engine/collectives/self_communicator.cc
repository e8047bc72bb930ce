#include "engine/collectives/self_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "base/mutex.h"

namespace overspill::engine {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int world() const override { return 1; }

  void all_gather(std::span<std::byte>) override { throw_if_aborted("all_gather"); }

  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    throw_if_aborted("all_to_all");
    if (send.size() != receive.size()) {
      throw CommunicatorError(
          fmt::format("all_to_all: rank 0 sends {} bytes and has room for {}", send.size(), receive.size()));
    }
    std::copy(send.begin(), send.end(), receive.begin());
  }

  void exchange(std::span<const std::span<const std::byte>>, std::span<const std::span<std::byte>>) override {
    throw_if_aborted("exchange");
  }

  void all_reduce_sum(std::span<double>) override { throw_if_aborted("all_reduce_sum"); }
  void barrier() override { throw_if_aborted("barrier"); }

  void abort(const char* reason) noexcept override {
    const MutexLock lock(mutex_);
    if (!aborted_) aborted_ = reason;
  }

  std::string failure() override {
    const MutexLock lock(mutex_);
    return aborted_ ? "rank 0 aborted: " + *aborted_ : std::string();
  }

 private:
  void throw_if_aborted(const char* call) {
    const MutexLock lock(mutex_);
    if (aborted_) throw CommunicatorError(fmt::format("{}: rank 0 aborted: {}", call, *aborted_));
  }

  Mutex mutex_;
  std::optional<std::string> aborted_ GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator() {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace overspill::engine
