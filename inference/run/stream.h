// Matrices that are not held in memory: read anew for each pass, ahead of use.
#pragma once

#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "inference/format/model_folder.h"
#include "inference/run/chunks.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

/// What a layer uses together, in the order in which it does.
enum class Part : uint8_t { qkv, out, up, gate, down };

/// The matrices of a part; in a slot they lie behind each other.
struct StreamedPart {
  size_t layer = 0;
  Part part = Part::qkv;
  std::vector<WantedMatrix> matrices;
  int64_t bytes = 0;       // in a slot
  int64_t read_bytes = 0;  // of the folder
};

/// Reads parts of layers in the order of a pass, and again from the first, into a few slots of memory: as
/// many parts ahead as there are free slots. What is read is packed as it would be for memory, so that a
/// streamed model computes the same bits. Threads of its own read and pack, a few panels at a time, so that
/// the disk has always something to do; they go past the kernel's page cache where the file system lets them.
class LayerStream {
 public:
  /// At least as many parts as slots. `users`: threads that acquire and release every part. The folder, and
  /// the matrices that are pointed to, outlive this. Throws std::bad_alloc, or io::StoreError where the
  /// machine refuses a thread.
  LayerStream(const ModelFolder& folder, std::vector<StreamedPart> parts, int slots, int users);
  LayerStream(const LayerStream&) = delete;
  LayerStream& operator=(const LayerStream&) = delete;
  ~LayerStream();

  /// Whether the part is one of these. Each user acquires and releases them in the order given, all of them
  /// in every pass.
  bool has(size_t layer, Part part) const { return index_of(layer, part) >= 0; }
  /// Returns when the part's matrices are there for this user, until its release. False, for every user,
  /// where they could not be read, and so for every part that follows; error() says why.
  bool acquire(int user, size_t layer, Part part);
  void release(int user);  // of the part that it acquired last
  std::exception_ptr error() const;

  /// What one pass reads.
  int64_t bytes() const { return bytes_; }
  /// Since the beginning.
  Reading reading() const;
  /// Reads as in a pass for so long, or for a whole one, and begins again from the first part. What was read
  /// does not include times at which there was no free slot. Called between two passes. Throws what reading
  /// threw.
  Reading try_reading(double seconds);

 private:
  /// A few panels of one matrix. Parts count since the beginning.
  struct Chunk {
    int64_t part = 0;
    size_t matrix = 0;  // of the part
    PanelRange range{};
  };
  struct Slot {
    kernels::HostPages memory;
    int64_t part = -1;        // that it holds, or is to hold
    int64_t panels_left = 0;  // to be packed
    int users_left = 0;       // that have not released it
  };

  int64_t index_of(size_t layer, Part part) const;
  const StreamedPart& part_of(int64_t part) const {
    return parts_[static_cast<size_t>(part) % parts_.size()];
  }
  Slot& slot_of(int64_t part) REQUIRES(mutex_) { return slots_[static_cast<size_t>(part) % slots_.size()]; }
  bool is_filled(int64_t part) REQUIRES(mutex_) {
    const Slot& slot = slot_of(part);
    return slot.part == part && slot.panels_left == 0;
  }
  void begin_again();
  void end();
  void serve();
  std::optional<Chunk> next_chunk();
  void begin_part(const StreamedPart& part) REQUIRES(mutex_);
  void end_chunk(const Chunk& chunk, const std::exception_ptr& error);

  const ModelFolder& folder_;
  const std::vector<StreamedPart> parts_;
  const int users_;
  std::vector<std::vector<int64_t>> index_;  // [layer][part]: in parts_, or -1
  int64_t bytes_ = 0;

  mutable Mutex mutex_;
  Condition changed_;
  std::vector<Slot> slots_ GUARDED_BY(mutex_);
  std::vector<int64_t> acquired_ GUARDED_BY(mutex_);  // parts, by user; each changes its own
  int64_t released_ GUARDED_BY(mutex_) = 0;           // parts, by all users
  Chunk next_ GUARDED_BY(mutex_);                     // that a thread is to take, but for its end
  Meter meter_ GUARDED_BY(mutex_);
  bool rests_ GUARDED_BY(mutex_) = false;  // nobody takes a chunk
  bool ends_ GUARDED_BY(mutex_) = false;
  // The first part that could not be read.
  int64_t failed_ GUARDED_BY(mutex_) = std::numeric_limits<int64_t>::max();
  std::exception_ptr error_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace overspill::inference
