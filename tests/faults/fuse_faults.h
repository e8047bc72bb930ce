// What fuse_layer does wrong, in memory that the test shares with it.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace overspill::testing {

/// Classes of operations, a bit each.
enum class FuseOperation : uint32_t {
  read = 1,
  write = 2,
  sync = 4,  // of files and of folders
  name = 8,  // create, mkdir, link, rename, unlink, rmdir
  space = 16,
};

struct FuseFaults {
  std::atomic<uint32_t> operations{0};   // which fail
  std::atomic<int32_t> os_error{0};      // with what
  std::atomic<int64_t> let_through{0};   // of these, before they fail
  std::atomic<int64_t> failures{0};      // so many fail, then no more
  std::atomic<bool> short_reads{false};  // half of what was asked, at least one block
  std::atomic<int64_t> flip_every{0};    // one bit of each n-th read
  std::atomic<int64_t> delay_us{0};      // up to this, before each read and write
  std::atomic<bool> hang{false};         // what is in `hangs` waits until it is false
  std::atomic<uint32_t> hangs{static_cast<uint32_t>(FuseOperation::read) |
                              static_cast<uint32_t>(FuseOperation::write)};
  std::atomic<int64_t> hang_lets_through{0};  // of what is in `hangs`, before it hangs
  // Set before the mount: a deleted file that is open is renamed, as on NFS.
  std::atomic<bool> keeps_open_names{false};

  // How often it happened.
  std::atomic<int64_t> failed{0}, shortened{0}, flipped{0}, delayed{0}, hanging{0}, reads{0}, writes{0};
};

inline FuseFaults* map_fuse_faults(int file) {
  void* memory = ::mmap(nullptr, sizeof(FuseFaults), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("the shared memory cannot be mapped");
  return static_cast<FuseFaults*>(memory);
}

}  // namespace overspill::testing
