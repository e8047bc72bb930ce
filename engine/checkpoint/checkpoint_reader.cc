#include "engine/checkpoint/checkpoint_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/checksum.h"

namespace overspill::engine {
namespace {

constexpr int64_t kSumBlock = io::kChecksumBlockBytes;
constexpr int64_t kReadBytes = 64 * kSumBlock;  // at a time, where memory for all of them would be too much
constexpr size_t kOpenFilesMax = 64;            // a process may have a thousand, and the engine has its own

void check_asked(const std::filesystem::path& folder, const FileRange& range, int64_t begin, int64_t count) {
  if (begin >= 0 && begin <= range.bytes && count >= 0 && count <= range.bytes - begin &&
      std::ssize(range.block_checksums) == io::checksum_blocks(range.bytes)) {
    return;
  }
  throw CheckpointError(fmt::format(
      "{}: {} bytes at {} were asked for of a range of {} bytes and {} checksums; this is a mistake "
      "in the program",
      (folder / range.file).string(), count, begin, range.bytes, range.block_checksums.size()));
}

/// `bytes` are whole blocks of the range from `first` on.
void verify_blocks(const std::filesystem::path& folder, const FileRange& range, int64_t first,
                   std::span<const std::byte> bytes) {
  for (int64_t i = 0; i < io::checksum_blocks(std::ssize(bytes)); ++i) {
    const std::span<const std::byte> block = io::checksummed_block(bytes, i);
    const uint64_t found = io::checksum_block(block);
    const uint64_t expected = range.block_checksums[static_cast<size_t>(first + i)];
    if (found == expected) continue;
    throw CheckpointError(
        fmt::format("{}: {} bytes at {} are corrupt: checksum {:016x}, written as {:016x}; {}",
                    (folder / range.file).string(), block.size(), range.offset + (first + i) * kSumBlock,
                    found, expected, kUseAnotherCheckpoint));
  }
}

/// How many bytes, whole blocks, O_DIRECT can read from there to where they stay; 0: they need a buffer.
int64_t straight_bytes(int64_t offset, std::span<const std::byte> to) {
  const bool aligned =
      offset % io::kBlockBytes == 0 && reinterpret_cast<uintptr_t>(to.data()) % io::kBlockBytes == 0;
  return aligned ? std::min(std::ssize(to), kReadBytes) / kSumBlock * kSumBlock : 0;
}

}  // namespace

std::shared_ptr<const CheckpointFile> CheckpointReader::file(const std::string& name) const {
  const MutexLock lock(mutex_);
  if (const auto found = open_.find(name); found != open_.end()) return found->second;
  auto opened = std::make_shared<const CheckpointFile>(CheckpointFile::open(path_of(folder_, name)));
  if (through_ == Through::nothing) opened->pass_cache();
  if (open_.size() >= kOpenFilesMax) open_.clear();  // who reads one keeps it open meanwhile
  open_.emplace(name, opened);
  return opened;
}

std::span<const std::byte> CheckpointReader::read(const FileRange& range, int64_t begin, int64_t count,
                                                  io::PageBuffer& buffer) const {
  check_asked(folder_, range, begin, count);
  const std::shared_ptr<const CheckpointFile> opened = file(range.file);
  if (count == 0) return {};
  const int64_t first = begin / kSumBlock;
  const int64_t from = first * kSumBlock;
  const int64_t end = std::min((begin + count + kSumBlock - 1) / kSumBlock * kSumBlock, range.bytes);
  // O_DIRECT wants whole pages of the file; a range may begin within one.
  const int64_t lead = (range.offset + from) % io::kBlockBytes;
  const int64_t wanted = lead + end - from;
  const std::span<std::byte> memory = buffer.first(io::round_up_to_block(wanted));
  opened->read_pages(memory, range.offset + from - lead, wanted);
  const std::span<const std::byte> blocks = memory.subspan(lead, end - from);
  verify_blocks(folder_, range, first, blocks);
  return blocks.subspan(begin - from, count);
}

void CheckpointReader::read_into(const FileRange& range, int64_t begin, std::span<std::byte> to,
                                 io::PageBuffer& buffer) const {
  check_asked(folder_, range, begin, std::ssize(to));
  const std::shared_ptr<const CheckpointFile> opened = file(range.file);
  for (int64_t done = 0; done < std::ssize(to);) {
    const int64_t at = begin + done, left = std::ssize(to) - done;
    const int64_t whole =
        at + left == range.bytes ? left : (at + left) / kSumBlock * kSumBlock - at;  // ends with a block
    if (through_ == Through::page_cache && at % kSumBlock == 0 && whole > 0) {
      const std::span<std::byte> blocks = to.subspan(done, std::min(whole, kReadBytes));
      opened->read_at(blocks, range.offset + at);
      verify_blocks(folder_, range, at / kSumBlock, blocks);
      done += std::ssize(blocks);
      continue;
    }
    if (const int64_t straight = through_ == Through::nothing && at % kSumBlock == 0
                                     ? straight_bytes(range.offset + at, to.subspan(done))
                                     : 0;
        straight > 0) {
      const std::span<std::byte> blocks = to.subspan(done, straight);
      opened->read_at(blocks, range.offset + at);
      verify_blocks(folder_, range, at / kSumBlock, blocks);
      done += straight;
      continue;
    }
    // To the end of a block, so that none is read twice.
    const int64_t most = through_ == Through::page_cache ? kSumBlock : kReadBytes;
    const int64_t bytes = std::min(left, most - at % most);
    std::ranges::copy(read(range, at, bytes, buffer), to.subspan(done).begin());
    done += bytes;
  }
}

void read_range(const std::filesystem::path& folder, const FileRange& range, std::span<std::byte> to) {
  read_range_part(folder, range, 0, to);
}

void read_range_part(const std::filesystem::path& folder, const FileRange& range, int64_t begin,
                     std::span<std::byte> to) {
  io::PageBuffer buffer;
  CheckpointReader(folder, CheckpointReader::Through::page_cache).read_into(range, begin, to, buffer);
}

}  // namespace overspill::engine
