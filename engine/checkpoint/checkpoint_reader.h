// Reads what a manifest names, every block against its checksum.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "base/mutex.h"
#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/manifest.h"
#include "io/page_buffer.h"

namespace overspill::engine {

/// The files of a checkpoint's folder, each opened when it is first read. Any threads, each with a buffer of
/// its own.
class CheckpointReader {
 public:
  /// Where the bytes are fetched. What is read once goes past the page cache: a copy of every byte is saved,
  /// and what others have there stays.
  enum class Through { nothing, page_cache };

  explicit CheckpointReader(std::filesystem::path folder, Through through = Through::nothing)
      : folder_(std::move(folder)), through_(through) {}

  const std::filesystem::path& folder() const { return folder_; }

  /// `count` bytes of a range from `begin` on, read at once with the rest of the blocks that they touch. They
  /// lie in the buffer, anywhere in it. Throws CheckpointError naming what is damaged or missing.
  std::span<const std::byte> read(const FileRange& range, int64_t begin, int64_t count,
                                  io::PageBuffer& buffer) const EXCLUDES(mutex_);

  /// Bytes from `begin` on into their place, which has nothing of use where one is damaged. Through the page
  /// cache whole blocks take no way round by the buffer.
  void read_into(const FileRange& range, int64_t begin, std::span<std::byte> to, io::PageBuffer& buffer) const
      EXCLUDES(mutex_);

 private:
  std::shared_ptr<const CheckpointFile> file(const std::string& name) const EXCLUDES(mutex_);

  std::filesystem::path folder_;
  Through through_;
  mutable Mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<const CheckpointFile>, std::less<>> open_ GUARDED_BY(mutex_);
};

/// Compares every byte of the ranges with its checksum, by several threads. report(bytes so far): on the
/// calling thread. Throws CheckpointError naming what is damaged or missing.
void verify_ranges(const CheckpointReader& files, std::span<const FileRange* const> ranges,
                   const std::function<void(int64_t)>& report);

/// verify_checkpoint for a manifest that is read already; of its pieces alone.
VerifyResult verify_data(const CheckpointReader& files, const Manifest& manifest,
                         void (*progress)(void*, int64_t, int64_t) = nullptr, void* context = nullptr);

}  // namespace overspill::engine
