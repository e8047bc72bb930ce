#include "io/slab_export.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <iterator>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "io/checksum.h"
#include "io/page_buffer.h"
#include "io/part_folder.h"
#include "io/patient_read.h"
#include "io/stall_watch.h"

namespace overspill::io {
namespace {

constexpr int64_t kCopyBytes = int64_t{1} << 20;
constexpr int64_t kCopyThreads = 4;
constexpr int64_t kBytesPerThread = int64_t{64} << 20;  // fewer are copied before a second thread has begun
constexpr int kRest = 6;  // times as long as a leisurely copy of kCopyBytes has taken

class Exporter {
 public:
  Exporter(const std::filesystem::path& folder, const std::string& job, SlabShares& shares, ExportPace& pace,
           StallWatch* watch)
      : folder_(folder), job_(job), shares_(shares), pace_(pace), watch_(watch) {}
  ~Exporter() {
    if (done_) return;
    for (const auto& path : made_) ::unlink(path.c_str());
    for (Place& place : parts_) {
      if (place.share) shares_.end(*place.share);
      unmake_part(folder_, place.part);
    }
    if (here_.share) shares_.end(*here_.share);
  }

  Export run(std::span<const ExportItem> items) {
    try {
      return take(items);
    } catch (const StoreError& error) {
      // Whoever removes files of a disk that does not answer waits for it.
      if (error.error().kind == ErrorKind::stalled) done_ = true;
      throw;
    }
  }

 private:
  Export take(std::span<const ExportItem> items) {
    Export out;
    std::vector<ExportedExtent>& results = out.extents;
    results.resize(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      const auto& [extent, slab, sums] = items[i];
      results[i] = {.file = "",
                    .offset = extent.offset,
                    .bytes = extent.bytes,
                    .block_checksums = {sums.begin(), sums.end()},
                    .linked = false};
    }
    link_all(items, results, [&](const SlabFile& slab) { return link(slab, here_); });
    // A folder on none of the store's file systems is to be a copy: whoever chose it wants no part elsewhere.
    if (here_.share) link_all(items, results, [&](const SlabFile& slab) { return link_in_part(slab); });
    int64_t copied_bytes = 0;
    for (size_t i = 0; i < items.size(); ++i) copied_bytes += results[i].linked ? 0 : items[i].extent.bytes;
    if (copied_bytes > 0) copy(items, results, copied_bytes);
    for (const Place& place : parts_) sync_folder(place.part.path, watch_);
    sync_folder(folder_, watch_);
    done_ = true;  // they are the folder's now
    out.share = here_.share;
    for (const Place& place : parts_) {
      if (place.share) out.part_shares.push_back(*place.share);
    }
    return out;
  }

  /// Where slabs are linked: the folder, whose part has no id, or a part of it.
  struct Place {
    PartFolder part;
    std::optional<uint64_t> share = std::nullopt;
    std::map<const SlabFile*, std::optional<std::string>> names = {};
  };

  template <class Link>
  void link_all(std::span<const ExportItem> items, std::vector<ExportedExtent>& results, Link link) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (results[i].linked) continue;
      if (const auto name = link(*items[i].slab)) {
        results[i].file = *name;
        results[i].linked = true;
      }
    }
  }

  std::optional<std::string> link_in_part(const SlabFile& slab) {
    const std::filesystem::path base = slab.path.parent_path().parent_path();
    if (refused_.contains(base)) return std::nullopt;
    auto place =
        std::ranges::find(parts_, base, [](const Place& each) { return each.part.path.parent_path(); });
    if (place == parts_.end()) {
      parts_.push_back({make_part(folder_, base)});
      place = std::prev(parts_.end());
    }
    const auto name = link(slab, *place);
    if (name) return fmt::format("{}/{}", place->part.id, *name);
    if (!place->share) {  // it refuses links too
      unmake_part(folder_, place->part);
      parts_.erase(place);
      refused_.insert(base);
    }
    return std::nullopt;
  }

  // The link's name, made at the slab's first extent; nothing where it cannot be linked there.
  std::optional<std::string> link(const SlabFile& slab, Place& place) {
    const auto known = place.names.find(&slab);
    if (known != place.names.end()) return known->second;
    if (slab.sync_failed) return place.names.emplace(&slab, std::nullopt).first->second;
    slab.sync_failed = true;  // until it has succeeded
    if ((errno = sync_data(watch_, slab.fd.get(), slab.path.string())) != 0)
      throw system_error(Operation::sync, slab.path);
    slab.sync_failed = false;
    return place.names.emplace(&slab, make_link(slab, place)).first->second;
  }

  std::optional<std::string> make_link(const SlabFile& slab, Place& place) {
    if (!begin_share(slab, place)) return std::nullopt;
    const std::string number = slab.path.stem().string().substr(kSlabPrefix.size());
    for (int attempt = 0;; ++attempt) {
      const std::string name = fmt::format("{}{}-{}{}.bin", kSlabPrefix, job_, number,
                                           attempt == 0 ? "" : fmt::format("-{}", attempt));
      const auto path = place.part.path / name;
      if (::link(slab.path.c_str(), path.c_str()) == 0) {
        made_.push_back(path);
        if (!same_file(slab.fd.get(), path)) {
          // Something else has the slab's name, or the file system gives each name a number of its own. What
          // the descriptor reads is right either way.
          ::unlink(path.c_str());
          made_.pop_back();
          return std::nullopt;
        }
        shares_.add(*place.share, slab, path);
        return name;
      }
      if (refuses_links(errno)) return std::nullopt;
      if (errno != EEXIST)
        throw system_error(Operation::link, path, fmt::format("hard link to {}", slab.path.string()));
      if (same_file(slab.fd.get(), path)) {  // an earlier export into this folder
        shares_.add(*place.share, slab, path);
        return name;
      }
    }
  }

  bool begin_share(const SlabFile& slab, Place& place) {
    if (place.share) return true;
    place.share = shares_.begin(slab, place.part.path, job_);
    if (place.share) made_.push_back(shares_.path(*place.share));
    return place.share.has_value();
  }

  /// Several threads, as one waits for one disk at a time; a leisurely copy has one.
  void copy(std::span<const ExportItem> items, std::vector<ExportedExtent>& results, int64_t bytes) {
    ExtentFile file(folder_, job_, bytes);
    made_.push_back(file.path());
    std::vector<size_t> copied;
    int64_t end = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      if (!results[i].file.empty()) continue;
      results[i].file = file.path().filename().string();
      results[i].offset = end;
      end += items[i].extent.bytes;
      copied.push_back(i);
    }
    StallWatch::Progress progress(watch_, Operation::write, file.path().string());
    std::atomic<size_t> next = 0;
    std::atomic<bool> failed = false;
    const auto work = [&] {
      PageBuffer buffer;
      for (size_t i = next++; i < copied.size() && !failed; i = next++)
        copy_extent(file, items[copied[i]], results[copied[i]].offset, buffer.first(kCopyBytes), progress);
    };
    std::vector<std::exception_ptr> errors(threads_for(bytes));
    {
      std::vector<std::jthread> others;
      const auto guarded = [&](size_t thread) noexcept {
        try {
          work();
        } catch (...) {
          errors[thread] = std::current_exception();
          failed = true;
        }
      };
      for (size_t thread = 1; thread < errors.size() && thread < copied.size(); ++thread) {
        try {
          others.emplace_back(guarded, thread);
        } catch (const std::system_error&) {  // the machine refuses threads: fewer will do
          break;
        }
      }
      guarded(0);
    }
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
    file.finish(watch_);
  }

  size_t threads_for(int64_t bytes) const {
    if (pace_.leisurely) return 1;
    return static_cast<size_t>(std::clamp<int64_t>(bytes / kBytesPerThread, 1, kCopyThreads));
  }

  void copy_extent(const ExtentFile& file, const ExportItem& item, int64_t offset,
                   std::span<std::byte> buffer, StallWatch::Progress& progress) {
    for (int64_t done = 0; done < item.extent.bytes; done += kCopyBytes) {
      const auto begin = std::chrono::steady_clock::now();
      const int64_t bytes = std::min(kCopyBytes, item.extent.bytes - done);
      const std::span<std::byte> part = buffer.first(static_cast<size_t>(bytes));
      read(*item.slab, item.extent.offset + done, part);
      verify(item, done, part);
      file.write(part, offset + done);
      file.start_writing(offset + done, bytes);
      pace_.copied_bytes += bytes;
      progress.moved();
      if (pace_.leisurely) std::this_thread::sleep_for(kRest * (std::chrono::steady_clock::now() - begin));
    }
  }

  static void verify(const ExportItem& item, int64_t done, std::span<const std::byte> part) {
    for (int64_t i = 0; i < checksum_blocks(std::ssize(part)); ++i) {
      const uint64_t found = checksum_block(checksummed_block(part, i));
      const uint64_t expected = item.sums[static_cast<size_t>(done / kChecksumBlockBytes + i)];
      if (found == expected) continue;
      throw StoreError(corrupt(item.slab->path.string(), item.extent.offset + done + i * kChecksumBlockBytes,
                               kChecksumBlockBytes, expected, found));
    }
  }

  static void read(const SlabFile& slab, int64_t offset, std::span<std::byte> part) {
    while (!part.empty()) {
      const ssize_t result = read_some(slab.fd.get(), part, offset, slab.path);
      if (result < 0) throw system_error(Operation::read, slab.path);
      if (result == 0) {
        throw StoreError({.kind = ErrorKind::truncated,
                          .operation = Operation::read,
                          .path = slab.path.string(),
                          .offset_bytes = offset,
                          .length_bytes = static_cast<int64_t>(part.size())});
      }
      part = part.subspan(static_cast<size_t>(result));
      offset += result;
    }
  }

  const std::filesystem::path folder_;
  const std::string job_;
  SlabShares& shares_;
  ExportPace& pace_;
  StallWatch* const watch_;
  Place here_{.part = {.id = "", .path = folder_}};
  std::list<Place> parts_;
  std::set<std::filesystem::path> refused_;  // where no part can be
  std::vector<std::filesystem::path> made_;
  bool done_ = false;  // else all that was made is removed
};

}  // namespace

ExtentFile::ExtentFile(const std::filesystem::path& folder, const std::string& job, int64_t bytes_total) {
  for (int n = 0; !fd_; ++n) {
    path_ = folder / fmt::format("extents-{}-{}.bin", job, n);
    fd_ = UniqueFd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd_ && errno != EEXIST) throw system_error(Operation::open, path_);
  }
  const auto refuse = [&](int os_error) {
    const StoreError error =
        system_error(os_error, Operation::reserve, path_,
                     fmt::format("{} bytes are copied into this checkpoint; {} bytes are available",
                                 bytes_total, available_bytes(folder)));
    ::unlink(path_.c_str());
    throw error;
  };
  if (beyond_limit(bytes_total)) refuse(EFBIG);
  const int refused = take_space(fd_.get(), bytes_total);
  if (refused == 0) return;
  if (refused != EOPNOTSUPP) refuse(refused);
  if (available_bytes(folder) < bytes_total) refuse(ENOSPC);
}

void ExtentFile::append(std::span<const std::byte> bytes) {
  write(bytes, bytes_);
  bytes_ += std::ssize(bytes);
}

void ExtentFile::write(std::span<const std::byte> bytes, int64_t offset) const {
  while (!bytes.empty()) {
    const ssize_t result = ::pwrite(fd_.get(), bytes.data(), bytes.size(), offset);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) throw system_error(Operation::write, path_, fmt::format("at offset {}", offset));
    bytes = bytes.subspan(static_cast<size_t>(result));
    offset += result;
  }
}

void ExtentFile::start_writing(int64_t offset, int64_t bytes) const noexcept {
  // Its answer is no promise: finish() asks for durability.
  static_cast<void>(::sync_file_range(fd_.get(), offset, bytes, SYNC_FILE_RANGE_WRITE));
}

void ExtentFile::finish(StallWatch* watch) {
  if ((errno = sync_data(watch, fd_.get(), path_.string())) != 0) throw system_error(Operation::sync, path_);
}

Export export_items(std::span<const ExportItem> items, const std::filesystem::path& folder,
                    const std::string& job, SlabShares& shares, ExportPace& pace, StallWatch* watch) {
  return Exporter(folder, job, shares, pace, watch).run(items);
}

}  // namespace overspill::io
