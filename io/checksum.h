// Checksums of the store and of checkpoints: XXH3-64 over every 64 KiB block; the last block may be shorter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/store.h"

namespace overspill::io {

constexpr int64_t checksum_blocks(int64_t bytes) {
  return (bytes + kChecksumBlockBytes - 1) / kChecksumBlockBytes;
}

/// XXH3-64, compiled for one instruction set.
struct ChecksumForm {
  const char* name;
  uint64_t (*hash)(const void* data, size_t bytes);
};

/// Those that this processor can run, the widest last; all of them give the same.
std::span<const ChecksumForm> checksum_forms();

/// XXH3-64, by the widest vectors of the processor.
uint64_t checksum_block(std::span<const std::byte> block);

/// The `index`-th checksummed block of `bytes`.
inline std::span<const std::byte> checksummed_block(std::span<const std::byte> bytes, int64_t index) {
  const auto begin = static_cast<size_t>(index * kChecksumBlockBytes);
  const auto rest = bytes.subspan(begin);
  return rest.first(rest.size() < kChecksumBlockBytes ? rest.size() : size_t{kChecksumBlockBytes});
}

inline std::vector<uint64_t> block_checksums(std::span<const std::byte> bytes) {
  std::vector<uint64_t> sums(static_cast<size_t>(checksum_blocks(static_cast<int64_t>(bytes.size()))));
  for (size_t i = 0; i < sums.size(); ++i) {
    sums[i] = checksum_block(checksummed_block(bytes, static_cast<int64_t>(i)));
  }
  return sums;
}

}  // namespace overspill::io
