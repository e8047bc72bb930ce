// The store on disk: slab files in a folder per job on one or more paths, moved by io_uring where the kernel
// allows it and by a few threads where not (docs/store.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/balance.h"
#include "io/patience.h"
#include "io/store.h"

namespace overspill::io {

struct FileStoreOptions {
  enum class Backend : uint8_t { automatic, uring, threads };

  /// Existing folders, one a disk. The store works in `<path>/overspill-<job>/`.
  std::vector<std::filesystem::path> paths;
  /// A run holds its job name on every path while it lives. Letters, digits, '-', '_', '.'.
  std::string job;
  /// Size of a slab file; a large reservation takes larger slabs, so that open files stay few.
  int64_t slab_bytes = int64_t{256} << 20;
  /// Pieces in flight on one path, and their size.
  int queue_depth = 32;
  int64_t piece_bytes = int64_t{4} << 20;
  /// `uring` throws `unsupported` where the kernel refuses it; `automatic` takes the threads then.
  Backend backend = Backend::automatic;
  int threads = 8;
  /// Ask for O_DIRECT; where the file system refuses it, I/O is buffered.
  bool direct = true;
  /// Speeds of the paths, in their order. Empty: the store measures several paths for a moment when it is
  /// opened. Later measurements replace both.
  std::vector<PathSpeed> speeds;
  Patience patience;
  /// For tests: may replace each result of the kernel. Called on the store's threads. See io/piece_queue.h.
  std::function<int64_t(bool writes, int64_t file_offset, int64_t asked_bytes, int64_t result)> result_hook;
};

/// Throws StoreError: `vanished` for a path that is not there, `locked` naming the pid of the run that holds
/// the job, `denied`, `invalid`. What a dead run of the same job left is removed; the destructor removes the
/// store's own files. Before destruction the caller drains; what is still queued then completes with
/// `cancelled`.
///
/// register_memory() pins the memory in the kernel, so its owner marks it MADV_DONTFORK.
/// drain(), register_memory(), unregister_memory() and export_extents() must not be called from a completion.
///
/// The store gives up a path that does not answer for Patience::stall.give_up_after, or whose ring fails:
/// every transfer of that path, under way or submitted later, then completes with that error, on one of the
/// store's threads. The path's files stay until the next run removes them. In a forked child the destructor
/// does nothing.
std::unique_ptr<Store> make_file_store(const FileStoreOptions& options);

}  // namespace overspill::io
