#include "io/sealed.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "io/checksum.h"

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

std::byte* Sealed::open(const Store& store, int64_t begin, int64_t end) {
  const auto [first, last] = blocks_of(begin, end, extent_.bytes);
  if (first != opened_) throw std::logic_error("blocks are opened in their order, each of them once");
  for (; opened_ < last; ++opened_) {
    if (!compares_) continue;
    const uint64_t expected = sums_[static_cast<size_t>(opened_)];
    const auto bytes = block(opened_);
    const uint64_t found = checksum_block(bytes);
    if (found == expected) continue;
    throw StoreError(corrupt(store.file_of(extent_), extent_.offset + opened_ * kChecksumBlockBytes,
                             static_cast<int64_t>(bytes.size()), expected, found));
  }
  return memory_ + begin;
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
