#include "kernels/simulated/address_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace overspill::kernels {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr std::byte kPoison{0xFF};

}  // namespace

void AddressSpace::FreePages::operator()(std::byte* data) const noexcept {
  ::operator delete (data, std::align_val_t{kPageBytes});
}

bool AddressSpace::Block::poisoned_from(int64_t begin) const {
  const std::byte* data = pages.get();
  return std::all_of(data + begin, data + mapped_bytes, [](std::byte b) { return b == kPoison; });
}

AddressSpace::~AddressSpace() {
  for (const Block& block : quarantine_) look_for_writes(block);
  if (violations_.empty()) return;
  for (const std::string& violation : violations_) fmt::print(stderr, "{}\n", violation);
  std::abort();
}

std::byte* AddressSpace::allocate(int64_t bytes) {
  const MutexLock lock(mutex_);
  throw_violation();
  if (bytes > options_.memory_bytes - used_bytes_) throw std::bad_alloc();
  const int64_t mapped_bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::unique_ptr<std::byte, FreePages> pages(static_cast<std::byte*>(
      ::operator new (static_cast<size_t>(mapped_bytes), std::align_val_t{kPageBytes})));
  std::byte* data = pages.get();
  std::fill_n(data, mapped_bytes, kPoison);
  live_.emplace(data, Block{std::move(pages), bytes, mapped_bytes, 0});
  used_bytes_ += bytes;
  return data;
}

void AddressSpace::free(std::byte* data) noexcept {
  const MutexLock lock(mutex_);
  auto node = live_.extract(data);  // from here on, no new copy finds it
  Block& block = node.mapped();
  if (block.copies > 0) {
    violations_.push_back(
        fmt::format("simulated device: {} bytes at {} were freed while a copy used them; wait "
                    "for the event of the last use first",
                    block.bytes, fmt::ptr(data)));
    while (block.copies > 0) copies_done_.wait(mutex_);
  }
  if (!block.poisoned_from(block.bytes)) {
    violations_.push_back(
        fmt::format("simulated device: a write past the end of {} bytes at {}", block.bytes, fmt::ptr(data)));
  }
  std::fill_n(data, block.mapped_bytes, kPoison);
  used_bytes_ -= block.bytes;
  quarantined_bytes_ += block.mapped_bytes;
  quarantine_.push_back(std::move(block));
  while (quarantined_bytes_ > options_.quarantine_bytes) {
    look_for_writes(quarantine_.front());
    quarantined_bytes_ -= quarantine_.front().mapped_bytes;
    quarantine_.pop_front();
  }
}

void AddressSpace::with(const void* data, int64_t bytes, const char* what, const std::function<void()>& use) {
  MutexLock lock(mutex_);
  Block& block = find(static_cast<const std::byte*>(data), bytes, what);
  ++block.copies;
  // Without the lock: it would order unrelated copies, and hide their races from ThreadSanitizer.
  lock.unlock();
  use();
  lock.lock();
  if (--block.copies == 0) copies_done_.notify_all();
}

void AddressSpace::verify() {
  const MutexLock lock(mutex_);
  for (; !quarantine_.empty(); quarantine_.pop_front()) look_for_writes(quarantine_.front());
  quarantined_bytes_ = 0;
  throw_violation();
}

bool AddressSpace::holds(const void* data) const {
  const auto* const at = static_cast<const std::byte*>(data);
  const MutexLock lock(mutex_);
  const auto after = live_.upper_bound(at);
  return after != live_.begin() && at - std::prev(after)->first < std::prev(after)->second.bytes;
}

AddressSpace::Block& AddressSpace::find(const std::byte* data, int64_t bytes, const char* what) {
  auto after = live_.upper_bound(data);
  if (after != live_.begin()) {
    auto& [begin, block] = *std::prev(after);
    const int64_t offset = data - begin;
    if (offset <= block.bytes && bytes <= block.bytes - offset) return block;
  }
  throw DeviceError(fmt::format(
      "simulated device: {} of {} bytes at {} lies outside every live allocation (freed too early, or a "
      "host address)",
      what, bytes, fmt::ptr(data)));
}

void AddressSpace::look_for_writes(const Block& block) {
  if (block.poisoned_from(0)) return;
  violations_.push_back(fmt::format("simulated device: {} bytes at {} were written after they were freed",
                                    block.bytes, fmt::ptr(block.pages.get())));
}

void AddressSpace::throw_violation() {
  if (violations_.empty()) return;
  const std::string violation = std::move(violations_.front());
  violations_.pop_front();
  throw DeviceError(violation);
}

}  // namespace overspill::kernels
