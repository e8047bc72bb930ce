#include "io/sealed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "io/checksum.h"
#include "io/kept.h"
#include "io/transfer_now.h"

namespace overspill::io {
namespace {

// The blocks that [begin, end) of `bytes` are made of.
struct Blocks {
  int64_t first;
  int64_t last;  // behind it
};

Blocks blocks_of(int64_t begin, int64_t end, int64_t bytes) {
  const bool whole = begin % kChecksumBlockBytes == 0 && (end % kChecksumBlockBytes == 0 || end == bytes);
  if (!whole || begin < 0 || begin > end || end > bytes)
    throw std::logic_error(fmt::format("bytes {} to {} of {} are no whole blocks", begin, end, bytes));
  return {begin / kChecksumBlockBytes, checksum_blocks(end)};
}

}  // namespace

Sealed::Sealed(int64_t bytes_max)
    : sums_(static_cast<size_t>(checksum_blocks(round_up_to_block(bytes_max)))) {}

std::span<uint64_t> Sealed::sums() {
  const auto blocks = static_cast<size_t>(checksum_blocks(extent_.bytes));
  if (blocks > sums_.size())
    throw std::logic_error(fmt::format("an extent of {} bytes has no room for its checksums", extent_.bytes));
  return std::span(sums_).first(blocks);
}

std::span<const std::byte> Sealed::block(int64_t index) const {
  return checksummed_block({memory_, static_cast<size_t>(extent_.bytes)}, index);
}

void Sealed::expect(Transfer& transfer) {
  start(transfer.memory, transfer.extent.bytes);
  extent_ = transfer.extent;
  compares_ = true;
  transfer.check = Transfer::Check::by_caller;
  transfer.checksums = sums();
}

void Sealed::start(std::byte* memory, int64_t bytes) {
  memory_ = memory;
  extent_ = {.slab = 0, .generation = 0, .offset = 0, .bytes = round_up_to_block(bytes)};
  compares_ = false;
  opened_ = sealed_ = 0;
}

std::byte* Sealed::open(Store& store, int64_t begin, int64_t end) {
  const auto [first, last] = blocks_of(begin, end, extent_.bytes);
  if (first != opened_) throw std::logic_error("blocks are opened in their order, each of them once");
  for (; opened_ < last; ++opened_) {
    if (!compares_) continue;
    const uint64_t expected = sums_[static_cast<size_t>(opened_)];
    if (checksum_block(block(opened_)) != expected) read_again(store, opened_);
  }
  return memory_ + begin;
}

/// Bits may have flipped on the way from a disk that has the right ones. The blocks before were maybe changed
/// since they were opened, so the extent is read into memory of its own, and this block alone is taken over.
void Sealed::read_again(Store& store, int64_t index) {
  const std::shared_ptr<std::byte> memory(
      static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, static_cast<size_t>(extent_.bytes))),
      &std::free);
  if (memory == nullptr) throw std::bad_alloc();
  Transfer transfer;
  transfer.priority = Transfer::Priority::demand;
  transfer.extent = extent_;
  transfer.memory = memory.get();
  transfer.second_reading = true;
  transfer_now(store, transfer);
  if (transfer.error && store.kernel_keeps_memory()) keep_for_ever(memory);
  if (transfer.error) throw StoreError(*transfer.error);
  const auto bytes = block(index);
  std::memcpy(memory_ + index * kChecksumBlockBytes, memory.get() + index * kChecksumBlockBytes,
              bytes.size());
}

void Sealed::seal(int64_t begin, int64_t end) {
  const auto [first, last] = blocks_of(begin, end, extent_.bytes);
  if (first != sealed_ || last > opened_)
    throw std::logic_error("blocks are sealed in their order, once they are open");
  for (; sealed_ < last; ++sealed_) sums()[static_cast<size_t>(sealed_)] = checksum_block(block(sealed_));
}

void Sealed::hand_over(Transfer& transfer) {
  if (sealed_ != checksum_blocks(extent_.bytes) || transfer.extent.bytes != extent_.bytes) {
    throw std::logic_error(fmt::format("{} of {} blocks are sealed, for an extent of {} bytes", sealed_,
                                       checksum_blocks(extent_.bytes), transfer.extent.bytes));
  }
  transfer.memory = memory_;
  transfer.check = Transfer::Check::by_caller;
  transfer.checksums = sums();
}

}  // namespace overspill::io
