#include "engine/checkpoint/merged_file.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/mutex.h"
#include "engine/checkpoint/manifest_check.h"
#include "engine/checkpoint/side_by_side.h"
#include "engine/checkpoint/weights.h"
#include "engine/partition/model.h"
#include "engine/partition/strides.h"

namespace overspill::engine {
namespace {

constexpr int64_t kMergeBytes = int64_t{2} << 20;  // read, converted and written at a time
constexpr int kMergeThreads = 16;                  // as many requests are in flight

/// Header length and header, padded to 8 bytes.
std::string header_of(const MergedFile& merged) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t begin = 0;
  for (const MergedTensor& tensor : merged.tensors) {
    header[tensor.name()] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape()}, {"data_offsets", {begin, begin + tensor.bytes}}};
    begin += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + text;
}

/// Bytes [begin, end) of the file, which one thread writes.
struct FileRun {
  int64_t begin;
  int64_t end;
  bool holds_tensor;  // it has a tensor that is all in memory meanwhile
};

/// The file, and where everything lies in it.
class MergedLayout {
 public:
  explicit MergedLayout(const MergedFile& merged) : merged_(merged), header_(header_of(merged)) {
    bytes_ = std::ssize(header_);
    for (const MergedTensor& tensor : merged_.tensors) {
      begins_.push_back(bytes_);
      bytes_ += tensor.bytes;
    }
  }

  int64_t bytes() const { return bytes_; }
  const std::string& header() const { return header_; }

  /// Runs of kMergeBytes. A tensor whose order is not row-major has no bytes before all of it was read: where
  /// it is larger than a run, one thread writes all runs that it touches, so that it is read once.
  std::vector<FileRun> runs() const {
    std::vector<FileRun> runs;
    int64_t at = 0;
    const auto add_until = [&](int64_t end) {
      for (; at < end; at += kMergeBytes) runs.push_back({at, std::min(at + kMergeBytes, bytes_), false});
    };
    for (size_t i = 0; i < begins_.size(); ++i) {
      const MergedTensor& tensor = merged_.tensors[i];
      if (!is_turned(tensor) || tensor.bytes <= kMergeBytes) continue;
      const int64_t end = (begins_[i] + tensor.bytes + kMergeBytes - 1) / kMergeBytes * kMergeBytes;
      add_until(begins_[i] / kMergeBytes * kMergeBytes);
      const bool joins = !runs.empty() && runs.back().holds_tensor && begins_[i] < runs.back().end;
      if (!joins) runs.push_back({at, at, true});
      runs.back().end = std::min(end, bytes_);
      at = end;
    }
    add_until(bytes_);
    return runs;
  }

  /// visit(tensor, its first byte wanted, that byte's place in the file, how many) for what lies in
  /// [begin, end).
  template <typename Visit>
  void for_each_part(int64_t begin, int64_t end, Visit visit) const {
    const auto behind = std::ranges::upper_bound(begins_, begin);
    for (size_t i = behind == begins_.begin() ? 0 : behind - begins_.begin() - 1;
         i < begins_.size() && begins_[i] < end; ++i) {
      const int64_t from = std::max(begin, begins_[i]);
      const int64_t to = std::min(end, begins_[i] + merged_.tensors[i].bytes);
      if (from < to) visit(merged_.tensors[i], from - begins_[i], from, to - from);
    }
  }

  static bool is_turned(const MergedTensor& tensor) {
    return tensor.given == nullptr && !tensor.segment->strides.empty();
  }

 private:
  const MergedFile& merged_;
  std::string header_;
  std::vector<int64_t> begins_;  // of the tensors
  int64_t bytes_ = 0;
};

/// One thread's share. What it needs for a run stays for the next.
class RunWriter {
 public:
  RunWriter(const CheckpointReader& checkpoint, const MergedLayout& layout, const CheckpointFile& file)
      : checkpoint_(checkpoint), layout_(layout), file_(file) {}

  /// Returns the bytes of tensors.
  int64_t write(const FileRun& run) {
    int64_t bytes = 0;
    for (int64_t at = run.begin; at < run.end; at += kMergeBytes)
      bytes += write_pages(at, std::min(kMergeBytes, run.end - at));
    turned_ = nullptr;
    std::vector<std::byte>().swap(whole_);
    return bytes;
  }

 private:
  int64_t write_pages(int64_t begin, int64_t bytes) {
    const std::span<std::byte> pages = buffer_.first(io::round_up_to_block(bytes));
    std::ranges::fill(pages.subspan(bytes), std::byte{0});  // behind the file's end, where it is cut
    const int64_t header = std::clamp<int64_t>(std::ssize(layout_.header()) - begin, 0, bytes);
    if (header > 0) std::memcpy(pages.data(), layout_.header().data() + begin, header);
    layout_.for_each_part(begin, begin + bytes,
                          [&](const MergedTensor& tensor, int64_t first, int64_t place, int64_t count) {
                            fill(tensor, first, pages.subspan(place - begin, count));
                          });
    file_.write_pages(pages, begin);
    return bytes - header;
  }

  /// Bytes of the tensor from `first` on; a run may begin within an element.
  void fill(const MergedTensor& tensor, int64_t first, std::span<std::byte> to) {
    if (tensor.given != nullptr) {
      std::ranges::copy(tensor.given->data.subspan(first, to.size()), to.begin());
      return;
    }
    if (MergedLayout::is_turned(tensor)) {
      std::ranges::copy(whole(tensor).subspan(first, to.size()), to.begin());
      return;
    }
    const int64_t width = dtype_bytes(tensor.dtype);
    const int64_t begin = first / width;
    const int64_t end = (first + std::ssize(to) + width - 1) / width;
    std::ranges::copy(read(tensor, begin, end - begin).subspan(first - begin * width, to.size()), to.begin());
  }

  /// Elements as they lie in the checkpoint.
  std::span<const std::byte> read(const MergedTensor& tensor, int64_t begin, int64_t count) {
    if (!reader_) {
      reader_.emplace(checkpoint_, *tensor.unit);
    } else if (tensor.unit != unit_) {
      reader_->turn_to(*tensor.unit);
    }
    unit_ = tensor.unit;
    return reader_->read(tensor.segment->begin + begin, count, tensor.dtype);
  }

  /// All of a tensor, row-major.
  std::span<const std::byte> whole(const MergedTensor& tensor) {
    if (turned_ == &tensor) return whole_;
    std::vector<std::byte>().swap(whole_);  // before the next one takes memory
    whole_.resize(static_cast<size_t>(tensor.bytes));
    RowMajor order(tensor.segment->shape, tensor.segment->strides);
    const int64_t width = dtype_bytes(tensor.dtype);
    for (int64_t done = 0; done < tensor.segment->elements; done += kMergeBytes / width) {
      const int64_t count = std::min(kMergeBytes / width, tensor.segment->elements - done);
      order.place(read(tensor, done, count), width, whole_);
    }
    turned_ = &tensor;
    return whole_;
  }

  const CheckpointReader& checkpoint_;
  const MergedLayout& layout_;
  const CheckpointFile& file_;
  io::PageBuffer buffer_;
  const ManifestUnit* unit_ = nullptr;  // that the reader reads
  std::optional<WeightReader> reader_;
  const MergedTensor* turned_ = nullptr;
  std::vector<std::byte> whole_;  // of `turned_`
};

}  // namespace

void write_merged(const CheckpointReader& checkpoint, const MergedFile& merged, CheckpointFile& file,
                  const std::function<void(int64_t)>& report) {
  const MergedLayout layout(merged);
  const std::vector<FileRun> runs = layout.runs();
  std::deque<RunWriter> writers;  // which stay where they are
  for (int i = 0; i < kMergeThreads; ++i) writers.emplace_back(checkpoint, layout, file);
  Mutex holds_tensor;  // one at a time: its tensor may have all the memory that there is
  file.preallocate(layout.bytes());
  file.pass_cache();
  side_by_side(
      std::ssize(runs), kMergeThreads,
      [&](int worker, int64_t item) {
        const FileRun& run = runs[static_cast<size_t>(item)];
        RunWriter& writer = writers[static_cast<size_t>(worker)];
        if (!run.holds_tensor) return writer.write(run);
        const MutexLock lock(holds_tensor);
        return writer.write(run);
      },
      report);
  file.cut(layout.bytes());
  file.sync();
}

}  // namespace overspill::engine
