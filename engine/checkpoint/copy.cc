// The copy has one file for each file of the source, with the named ranges one behind the other: a slab that
// was linked holds far more than the checkpoint. A copy that was cut off needs no journal: the checksums tell
// which of its bytes are there.
#include "engine/checkpoint/copy.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/checkpoint/checkpoint_file.h"
#include "io/checksum.h"
#include "io/files.h"
#include "io/patient_read.h"
#include "io/store.h"
#include "io/unique_fd.h"

namespace overspill::engine {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kCopyBytes = 64 * io::kChecksumBlockBytes;  // read and written at a time: whole blocks
constexpr int64_t kUnsyncedBytesMax = int64_t{256} << 20;     // written since the last fdatasync
constexpr const char* kOtherFolder = "free space, or name a folder on another disk";

[[noreturn]] void refuse_copy(const fs::path& path, std::string_view what, int os_error) {
  std::string reason = std::generic_category().message(os_error);
  if (os_error == EFBIG) reason += " (a limit of the file system, or of this process: ulimit -f)";
  throw CheckpointError(fmt::format("{}: {}: {}; {}", path.string(), what, reason, kOtherFolder));
}

/// A file of the copy, open to be read and written.
class CopyTarget {
 public:
  explicit CopyTarget(fs::path path)
      : path_(std::move(path)),
        file_(::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600)) {
    struct stat status = {};
    if (!file_ || ::fstat(file_.get(), &status) != 0) refuse_copy(path_, "cannot be opened", errno);
    if (!S_ISREG(status.st_mode) || status.st_nlink != 1) {
      throw CheckpointError(fmt::format(
          "{}: is no file of a copy; remove it, or name another folder for the copy", path_.string()));
    }
    bytes_before_ = status.st_size;
    allocated_ = int64_t{status.st_blocks} * 512;
  }

  int64_t bytes_before() const { return bytes_before_; }

  void take_space(int64_t bytes) const {
    if (::ftruncate(file_.get(), bytes) != 0)
      refuse_copy(path_, fmt::format("cannot have {} bytes", bytes), errno);
    int os_error = io::take_space(file_.get(), bytes);
    if (os_error == EOPNOTSUPP)  // this file alone: the next ones are looked at when their turn comes
      os_error = io::available_bytes(path_) + allocated_ < bytes ? ENOSPC : 0;
    if (os_error != 0) refuse_copy(path_, fmt::format("there is no room for {} bytes", bytes), os_error);
  }

  /// Whether all of these bytes are there and fit.
  bool has(int64_t offset, std::span<std::byte> scratch, std::span<const uint64_t> checksums) const {
    if (offset + std::ssize(scratch) > bytes_before_) return false;
    for (int64_t read = 0; read < std::ssize(scratch);) {
      const ssize_t got = io::read_some(file_.get(), scratch.subspan(read), offset + read, path_);
      if (got <= 0) return false;  // what cannot be read is written again
      read += got;
    }
    return std::ranges::equal(io::block_checksums(scratch), checksums);
  }

  void write(std::span<const std::byte> from, int64_t offset) {
    while (!from.empty()) {
      const ssize_t wrote = ::pwrite(file_.get(), from.data(), from.size(), offset);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) refuse_copy(path_, "cannot be written", wrote < 0 ? errno : ENOSPC);
      from = from.subspan(wrote);
      offset += wrote;
      unsynced_ += wrote;
    }
    if (unsynced_ >= kUnsyncedBytesMax) sync();
  }

  void sync() {
    if (::fdatasync(file_.get()) != 0) refuse_copy(path_, "cannot be made durable", errno);
    unsynced_ = 0;
  }

 private:
  fs::path path_;
  io::UniqueFd file_;
  int64_t bytes_before_ = 0;
  int64_t allocated_ = 0;
  int64_t unsynced_ = 0;
};

struct CopiedRange {
  const FileRange* from;
  FileRange* to;
};

/// Which ranges go into which file of the copy, in the order in which they lie in the source. It points into
/// the source's manifest.
struct CopyPlan {
  Manifest manifest;  // of the copy
  std::map<std::string, std::vector<CopiedRange>> files;
  std::map<std::string, int64_t> bytes;  // of each file
  int64_t total = 0;                     // without what lies between ranges
};

CopyPlan plan_copy(const Manifest& source) {
  CopyPlan plan;
  plan.manifest = source;
  std::map<std::string_view, std::vector<CopiedRange>> by_source;
  for (size_t u = 0; u < source.units.size(); ++u) {
    for (size_t p = 0; p < source.units[u].pieces.size(); ++p) {
      const FileRange& from = source.units[u].pieces[p].range;
      by_source[from.file].push_back({&from, &plan.manifest.units[u].pieces[p].range});
      plan.total += from.bytes;
    }
  }
  for (auto& [file, moves] : by_source) {
    std::ranges::sort(moves, {}, [](const CopiedRange& move) { return move.from->offset; });
    const std::string name = fmt::format("extents-{}.bin", plan.files.size());
    int64_t end = 0;
    for (const CopiedRange& move : moves) {
      end = (end + io::kBlockBytes - 1) / io::kBlockBytes * io::kBlockBytes;
      move.to->file = name;
      move.to->offset = end;
      end += move.to->bytes;
    }
    plan.bytes.emplace(name, end);
    plan.files.emplace(name, std::move(moves));
  }
  return plan;
}

class CopyRun {
 public:
  CopyRun(const fs::path& from, const fs::path& to, void (*progress)(void*, int64_t, int64_t), void* context)
      : from_(from), to_(to), progress_(progress), context_(context) {}

  CopyResult run() {
    if (::unlink((to_ / kManifestFile).c_str()) != 0 && errno != ENOENT)
      refuse_copy(to_ / kManifestFile, "cannot be removed", errno);
    sync_folder(to_);
    const Manifest source = read_manifest(from_);
    const CopyPlan plan = plan_copy(source);
    total_ = plan.total;
    // Beyond this point nothing waits for room: a disk that is too small is found before the first byte.
    std::map<std::string, int64_t> before;
    for (const auto& [name, bytes] : plan.bytes) {
      const CopyTarget target(to_ / name);
      before[name] = target.bytes_before();
      target.take_space(bytes);
    }
    for (const auto& [name, moves] : plan.files) copy_file(name, before[name] > 0, moves);
    write_manifest(to_, plan.manifest);
    result_.files = std::ssize(plan.files);
    return result_;
  }

 private:
  void copy_file(const std::string& name, bool was_there, const std::vector<CopiedRange>& moves) {
    CopyTarget target(to_ / name);
    for (const CopiedRange& move : moves) {
      for (int64_t begin = 0; begin < move.from->bytes; begin += kCopyBytes)
        copy_run(target, was_there, move, begin);
    }
    target.sync();
  }

  void copy_run(CopyTarget& target, bool was_there, const CopiedRange& move, int64_t begin) {
    buffer_.resize(static_cast<size_t>(std::min(kCopyBytes, move.from->bytes - begin)));
    const std::span<const uint64_t> sums =
        std::span(move.from->block_checksums)
            .subspan(begin / io::kChecksumBlockBytes, io::checksum_blocks(std::ssize(buffer_)));
    if (was_there && target.has(move.to->offset + begin, buffer_, sums)) {
      result_.kept += std::ssize(buffer_);
    } else {
      read_range_part(from_, *move.from, begin, buffer_);
      target.write(buffer_, move.to->offset + begin);
    }
    result_.bytes += std::ssize(buffer_);
    if (progress_ != nullptr) progress_(context_, result_.bytes, total_);
  }

  const fs::path& from_;
  const fs::path& to_;
  void (*progress_)(void*, int64_t, int64_t);
  void* context_;
  std::vector<std::byte> buffer_;
  int64_t total_ = 0;
  CopyResult result_;
};

}  // namespace

CopyResult copy_checkpoint(const fs::path& from, const fs::path& to,
                           void (*progress)(void*, int64_t, int64_t), void* context) {
  return CopyRun(from, to, progress, context).run();
}

}  // namespace overspill::engine
