// What O_DIRECT asks of memory addresses and file offsets, as the kernel tells it (statx, STATX_DIOALIGN).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace overspill::io {

struct DirectAlignment {
  int64_t mem_bytes = 0;     // of addresses; 0: the file takes no O_DIRECT
  int64_t offset_bytes = 0;  // of offsets and lengths
};

/// Empty where the kernel or the file system does not tell (before Linux 6.1, and many file systems).
std::optional<DirectAlignment> direct_alignment_of(int fd);

/// Why the store's blocks (kBlockBytes) do not do; "" where they do.
std::string refusal_of(const DirectAlignment& alignment);

}  // namespace overspill::io
