#include "engine/checkpoint/restore.h"

#include <algorithm>
#include <span>
#include <system_error>
#include <thread>

#include "base/mutex.h"
#include "engine/checkpoint/manifest_check.h"
#include "engine/checkpoint/side_by_side.h"
#include "io/checksum.h"
#include "io/page_buffer.h"
#include "kernels/host_pages.h"

namespace overspill::engine {
namespace {

constexpr int64_t kPlacedBytes = 64 * io::kChecksumBlockBytes;  // read into place at a time, by one thread
constexpr int kRestoreThreads = 16;
constexpr int64_t kRestoreBuffers = int64_t{64} << 20;  // of all threads, where a piece is no larger

constexpr int64_t kAnyTime = -1;

/// Threads pass one at a time, in the order of their turns: Access has one buffer for what is not in memory,
/// and where things come to lie in the store does not depend on which thread is faster.
class InTurn {
 public:
  /// Does nothing where a thread has failed, since its turn may never come.
  template <class Write>
  void pass(int64_t turn, Write write) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (next_ != turn && !failed_) passed_.wait(mutex_);
    if (failed_) return;
    lock.unlock();
    write();
    lock.lock();
    ++next_;
    passed_.notify_all();
  }

  void fail() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    failed_ = true;
    passed_.notify_all();
  }

 private:
  Mutex mutex_;
  Condition passed_;
  int64_t next_ GUARDED_BY(mutex_) = 0;
  bool failed_ GUARDED_BY(mutex_) = false;
};

/// What one thread does at once: bytes that go to where they stay, or a piece.
struct RestoreStep {
  const RestoredPiece* own;
  std::span<std::byte> place;  // empty: the piece is written by Access
  int64_t in_range = 0;        // where the bytes for `place` are
  int64_t turn = kAnyTime;     // of a piece that is not in memory: how many such come before it
};

class Restorer {
 public:
  Restorer(const CheckpointReader& files, const Setup& setup, Access& access)
      : files_(files), setup_(setup), access_(access) {}

  void add(const RestoredPiece& own) {
    const Component component = component_of(own);
    const std::vector<std::span<std::byte>> home =
        access_.at_home(own.unit, component, own.in_shard, own.elements);
    if (home.empty() || setup_.layout.units[own.unit].scaled(component)) {
      steps_.push_back({&own, {}, 0, home.empty() ? away_++ : kAnyTime});
      buffered_most_ = std::max(buffered_most_, own.piece->range.bytes);
      return;
    }
    int64_t at = own.in_piece * component_element_bytes(*own.found, own.piece->component);
    for (std::span<std::byte> part : home) {
      while (!part.empty()) {
        // To the end of a block, so that none is read twice.
        const int64_t bytes = std::min(std::ssize(part), kPlacedBytes - at % kPlacedBytes);
        steps_.push_back({&own, part.first(static_cast<size_t>(bytes)), at});
        part = part.subspan(static_cast<size_t>(bytes));
        at += bytes;
      }
    }
  }

  void run(const std::function<void(int64_t)>& report) {
    const auto threads = static_cast<int>(std::clamp<int64_t>(
        buffered_most_ == 0 ? kRestoreThreads : kRestoreBuffers / buffered_most_, 1, kRestoreThreads));
    std::vector<io::PageBuffer> buffers(static_cast<size_t>(threads));
    const std::jthread ahead = start_populating();
    side_by_side(
        std::ssize(steps_), threads,
        [&](int worker, int64_t item) {
          try {
            return restore(steps_[static_cast<size_t>(item)], buffers[static_cast<size_t>(worker)]);
          } catch (...) {
            in_turn_.fail();
            throw;
          }
        },
        report);
  }

 private:
  /// A new engine's memory has no pages yet. If no thread can be started, each reader gets its pages from the
  /// kernel when it writes.
  std::jthread start_populating() const {
    try {
      return std::jthread([this](const std::stop_token& stop) {
        for (const RestoreStep& step : steps_) {
          if (stop.stop_requested()) return;
          kernels::populate(step.place);
        }
      });
    } catch (const std::system_error&) {
      return {};
    }
  }

  Component component_of(const RestoredPiece& own) const {
    const Unit& unit = setup_.layout.units[own.unit];
    return Component{static_cast<uint8_t>(unit.component_named(own.piece->component))};
  }

  int64_t restore(const RestoreStep& step, io::PageBuffer& buffer) {
    if (!step.place.empty()) {
      files_.read_into(step.own->piece->range, step.in_range, step.place, buffer);
      return std::ssize(step.place);
    }
    const RestoredPiece& own = *step.own;
    const ManifestPiece& piece = *own.piece;
    const Component component = component_of(own);
    // The scales lie behind the whole piece; behind them the range may be longer, by any amount.
    const bool scaled = setup_.layout.units[own.unit].scaled(component);
    const int64_t width = component_element_bytes(*own.found, piece.component);
    const std::span<const std::byte> bytes =
        scaled ? files_.read(piece.range, 0, component_bytes(*own.found, piece.component, piece.elements),
                             buffer)
               : files_.read(piece.range, own.in_piece * width, own.elements * width, buffer);
    const auto write = [&] {
      access_.write_piece(own.unit, component, own.in_shard, own.elements, bytes,
                          scaled ? piece.elements : own.elements, scaled ? own.in_piece : 0);
    };
    if (step.turn == kAnyTime) {
      write();
    } else {
      in_turn_.pass(step.turn, write);
    }
    return std::ssize(bytes);
  }

  const CheckpointReader& files_;
  const Setup& setup_;
  Access& access_;
  std::vector<RestoreStep> steps_;
  int64_t buffered_most_ = 0;
  int64_t away_ = 0;  // pieces that are not in memory
  InTurn in_turn_;
};

}  // namespace

void restore_pieces(const CheckpointReader& files, const Setup& setup, Access& access,
                    const std::vector<RestoredPiece>& pieces, const std::function<void(int64_t)>& report) {
  Restorer restorer(files, setup, access);
  for (const RestoredPiece& piece : pieces) restorer.add(piece);
  restorer.run(report);
}

}  // namespace overspill::engine
