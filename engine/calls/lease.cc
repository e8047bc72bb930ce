// Leases of an engine's weights (engine.h).
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/calls/machine.h"
#include "engine/engine.h"

namespace overspill::engine {

Lease::~Lease() {
  if (machine_ == nullptr || block_ == nullptr || !machine_->process.here()) return;
  Core& core = machine_->core;
  std::vector<kernels::Event> uses;
  std::string failure;
  try {
    for (const Use& use : uses_) uses.push_back(machine_->queues.record(use.queue));
  } catch (const std::exception& error) {
    // The engine cannot learn when the device is done with the weights. A destructor does not throw, so the
    // engine's next call reports it.
    failure = error.what();
  }
  const MutexLock guard(core.mutex());
  for (size_t i = 0; i < uses.size(); ++i) {
    core.journal.note(DeviceSpan::Kind::compute, block_->unit, uses_[i].begin, uses[i],
                      uses_[i].queue.native);
  }
  if (!failure.empty()) {
    core.fail(fmt::format("ending a lease of {} failed: {}", machine_->setup.layout.units[block_->unit].name,
                          failure));
  }
  machine_->gatherer.release(block_, uses);
}

void Lease::use_on(Queue queue) {
  if (block_ == nullptr) return;
  machine_->check_process();
  const auto known = [queue](const Use& use) { return use.queue == queue; };
  Core& core = machine_->core;
  kernels::Stream& stream = machine_->queues.of(queue);
  kernels::Event copied;
  bool noted = false;
  {
    const MutexLock guard(core.mutex());
    if (std::any_of(uses_.begin(), uses_.end(), known)) return;
    copied = machine_->gatherer.use(block_, stream);
    noted = core.journal.on();
  }
  // Another thread on the same queue may be here too: each goes on when the queue has been told to wait.
  machine_->queues.wait(queue, copied);
  Use use{queue, noted ? machine_->queues.record(queue) : kernels::Event()};
  const MutexLock guard(core.mutex());
  if (std::none_of(uses_.begin(), uses_.end(), known)) uses_.push_back(std::move(use));
}

void Lease::copy_to_host(int64_t begin, std::span<std::byte> to) const {
  if (begin < 0 || begin > bytes_ || std::ssize(to) > bytes_ - begin) {
    throw std::invalid_argument(
        fmt::format("a copy of {} bytes from byte {} of a lease of {}", to.size(), begin, bytes_));
  }
  if (to.empty()) return;
  machine_->check_process();
  if (block_ == nullptr || machine_->hardware.device().shares_host_memory()) {  // the lease keeps the bytes
    std::memcpy(to.data(), data_ + begin, to.size());
    return;
  }
  machine_->gatherer.copy_to_host(*block_, to, data_ + begin);
}

void Lease::swap(Lease& other) noexcept {
  std::swap(machine_, other.machine_);
  std::swap(block_, other.block_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(uses_, other.uses_);
}

}  // namespace overspill::engine
