// Reads outside the store's queues (a checkpoint's files, slabs that are copied): a read that fails once is
// tried again, as in the store.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "io/patience.h"

namespace overspill::io {

/// Five more tries in 155 ms: whoever loads or saves waits for each file in turn.
inline constexpr RetryPolicy kReadAgain{.tries_max = 5};

/// As pread(2) of the open file `fd`, which may read fewer bytes than `to` has; an interrupted call and an
/// error that may pass are tried again, which a warning says once a file. -1 with errno where it still fails.
/// `path`: for the warning.
ssize_t read_some(int fd, std::span<std::byte> to, int64_t offset, const std::filesystem::path& path);

}  // namespace overspill::io
