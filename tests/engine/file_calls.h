// The system calls by which a checkpoint reaches the disk, seen from a test. The linker puts these in place
// of the C library's (-Wl,--wrap, tests/engine/CMakeLists.txt), in the test's program only: what ships has no
// seam for it. Calls from inside shared libraries (std::filesystem) are not seen; `Disk` (cut_disk.h) notices
// if one of them mattered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace overspill::testing {

struct FileCall {
  enum class Kind : uint8_t {
    open,
    close,
    write,
    allocate,
    sync,
    sync_all,  // of the whole file system
    make_folder,
    link,
    rename,
    remove
  };
  Kind kind = Kind::open;
  std::string path{};   // open, make_folder, remove; link, rename: what is there already
  std::string other{};  // link, rename: the new name
  int fd = -1;          // close, write, allocate, sync; done(): what open returned
  int flags = 0;        // open
  int64_t offset = -1;  // write (-1: behind what was written), allocate
  int64_t bytes = 0;    // write, allocate
};

const char* name_of(FileCall::Kind kind);

/// Called on the calling thread, from any thread.
class FileWatcher {
 public:
  virtual ~FileWatcher() = default;
  /// An errno: the call fails with it and changes nothing.
  virtual int failure_of(const FileCall&) { return 0; }
  /// It has succeeded; `data` is what was written, which may be less than was asked.
  virtual void done(const FileCall&, std::span<const std::byte> /*data*/) {}
  /// False: syncs are left out, for speed.
  virtual bool syncs() const { return true; }
};

/// While it lives every call passes the watcher. One at a time.
class WatchedFiles {
 public:
  explicit WatchedFiles(FileWatcher& watcher);
  ~WatchedFiles();
  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;
};

}  // namespace overspill::testing
