// Helpers for the store's files: errors of system calls, durable names, room on a file system.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <system_error>

#include "io/error.h"

namespace overspill::io {

class StallWatch;

/// The error of a failed system call; reads errno before anything can change it. If a limit of the process
/// caused the failure, the error names the limit.
StoreError system_error(Operation operation, const std::filesystem::path& path, std::string detail = "");
StoreError system_error(int os_error, Operation operation, const std::filesystem::path& path,
                        std::string detail = "");

/// The error for threads that the machine refuses. `what` says who needs how many.
StoreError no_threads(const std::system_error& error, const std::string& what);

/// Which file it is, whatever its names.
struct FileId {
  uint64_t device = 0;
  uint64_t inode = 0;

  friend bool operator==(const FileId&, const FileId&) = default;
  friend bool operator<(const FileId& a, const FileId& b) {
    return a.device != b.device ? a.device < b.device : a.inode < b.inode;
  }
};

/// What the file system says of a file, at this moment: network file systems answer from a cache unless they
/// are told not to.
struct FileLook {
  FileId id;
  int64_t bytes = 0;
  int64_t taken_bytes = 0;   // on the disk
  int64_t names = 0;         // hard links
  bool own_regular = false;  // a regular file of this user, which no other may write to
};
/// Nothing where it cannot be told, or where there is no such file; a symbolic link is looked at itself.
std::optional<FileLook> look_at(const std::filesystem::path& path);
std::optional<FileLook> look_at(int fd);

/// Makes the folder's entries durable, where the file system has an fsync of folders: some network and FUSE
/// file systems have none, and answer EINVAL or EOPNOTSUPP. Throws StoreError for every other answer.
/// `watch` sees the call; null: nothing does.
void sync_folder(const std::filesystem::path& folder, StallWatch* watch = nullptr);

/// Whether `path` is a name of the open file. A symbolic link is not.
bool same_file(int fd, const std::filesystem::path& path);

/// Whether hard links between two places cannot be, so that bytes must be copied.
bool refuses_links(int os_error);

/// Bytes this user may still take on the file system of `path`; 0 where that cannot be told.
int64_t available_bytes(const std::filesystem::path& path);

/// Whether this process may write no file of such a length (ulimit -f): the kernel would send SIGXFSZ, which
/// ends the process.
bool beyond_limit(int64_t file_bytes);

/// Takes the file system's room for the first `bytes` of an open file: no later write there needs any.
/// Returns 0 or an errno, EOPNOTSUPP where the file system or the kernel has no call for it.
int take_space(int fd, int64_t bytes);

/// The same by writing zeros, 4 MiB at a time, until they are durable. `moved` is called after each write.
int take_space_by_writing(int fd, int64_t bytes, const std::function<void()>& moved);

/// Whether a part of these bytes of the file is shared with another file (a reflink, a snapshot), so that a
/// write there takes new room. False where the file system does not tell.
bool has_shared_blocks(int fd, int64_t offset, int64_t bytes);

/// A warning on stderr, once a process for the same text.
void warn_once(const std::string& text);

}  // namespace overspill::io
