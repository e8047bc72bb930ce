// Experts that are not all held in memory: read as the router asks for them, and kept while there is room.
#pragma once

#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "inference/format/model_folder.h"
#include "inference/run/chunks.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

/// The experts of one layer's mixture, each with its matrices.
struct LayerExperts {
  size_t layer = 0;
  int64_t chosen = 0;  // of them, for a token
  std::vector<std::vector<WantedMatrix>> experts;
};

/// Slots of memory, each for an expert of any layer. A layer keeps about as many experts as any other, those
/// that were used last; a few slots more pass from layer to layer with what is read. An expert that is wanted
/// is not dropped before it was used. What is read is packed as it would be to stay, so that a model computes
/// the same bits. Threads of its own read, past the kernel's page cache where the file system lets them.
class ExpertStore {
 public:
  /// `users`: threads that use every expert that is wanted. The folder, and the matrices that are pointed to,
  /// outlive this. Throws std::bad_alloc, or io::StoreError where the machine refuses a thread.
  ExpertStore(const ModelFolder& folder, std::vector<LayerExperts> layers, int64_t slots, int users);
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;
  ~ExpertStore();

  /// What one slot takes.
  static int64_t slot_bytes(std::span<const LayerExperts> layers);

  /// Each user says which experts of a layer it will use next, in ascending order; all say the same, and have
  /// released what they wanted before. Reading begins. Throws nothing.
  void want(int user, size_t layer, std::span<const int32_t> experts);
  /// Called for each that is wanted, in their order: returns when its matrices are there, until the release.
  /// False, for every user, where they could not be read, and so for all that follow; error() says why.
  bool acquire(int user, size_t layer, int32_t expert);
  void release(int user);  // of the one that it acquired last
  std::exception_ptr error() const;

  /// Memory of the slots.
  int64_t bytes() const { return slot_count_ * slot_bytes_; }
  /// What a token's experts take in memory.
  int64_t bytes_a_token() const { return bytes_a_token_; }
  /// What is read for a token, where a router likes all experts alike.
  int64_t read_bytes_a_token() const { return read_bytes_a_token_; }
  /// Since the beginning.
  Reading reading() const;
  /// Reads experts that are not there for so long, or as many as a token has. What was read. Called between
  /// two passes. Throws what reading threw.
  Reading try_reading(double seconds);

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  /// Experts count from the first of the first layer.
  struct Expert {
    const std::vector<WantedMatrix>* matrices;
    size_t layer;  // of layers_
    double read_bytes_a_panel = 0;
  };
  struct Slot {
    int64_t expert = -1;
    int64_t panels_left = 0;  // to be packed
    int users_left = 0;       // that want it and have not released it
    bool begun = false;       // a user has acquired it
    int64_t used = 0;         // when, by the clock
  };
  struct Chunk {
    int64_t expert = -1;  // none
    size_t matrix = 0;
    PanelRange range{};
  };

  int64_t id_of(size_t layer, int32_t expert) const { return first_of_[layer] + expert; }
  const Expert& expert(int64_t id) const { return experts_[static_cast<size_t>(id)]; }
  int64_t& slot_of(int64_t id) REQUIRES(mutex_) { return slot_of_[static_cast<size_t>(id)]; }
  Slot& slot(int64_t number) REQUIRES(mutex_) { return slots_[static_cast<size_t>(number)]; }
  bool is_there(int64_t id) REQUIRES(mutex_) {
    const int64_t at = slot_of(id);
    return at >= 0 && slot(at).panels_left == 0;
  }
  void end();
  void serve();
  std::optional<Chunk> next_chunk();
  bool begin_expert() REQUIRES(mutex_);
  int64_t slot_for(int64_t id) const REQUIRES(mutex_);
  void leave(Slot& slot) REQUIRES(mutex_);
  void end_chunk(const Chunk& chunk, const std::exception_ptr& error);

  const ModelFolder& folder_;
  const std::vector<LayerExperts> layers_;
  const int users_;
  const int64_t slot_count_, slot_bytes_;
  int64_t bytes_a_token_ = 0, read_bytes_a_token_ = 0;
  std::vector<int64_t> first_of_;  // by the model's layer
  std::vector<Expert> experts_;
  std::vector<int64_t> share_;  // slots that a layer of layers_ may keep
  kernels::HostPages memory_;

  mutable Mutex mutex_;
  Condition changed_;
  std::vector<int64_t> slot_of_ GUARDED_BY(mutex_);  // by expert; -1: none
  std::vector<Slot> slots_ GUARDED_BY(mutex_);
  std::vector<int64_t> held_ GUARDED_BY(mutex_);       // slots, by layer of layers_
  std::vector<int64_t> wanted_by_ GUARDED_BY(mutex_);  // by user: how often it has called want
  std::vector<int64_t> in_use_ GUARDED_BY(mutex_);     // by user: the expert that it acquired
  int64_t wanted_ GUARDED_BY(mutex_) = 0;              // calls of want by the user that is ahead
  std::vector<int64_t> missing_ GUARDED_BY(mutex_);    // wanted, ascending, and without a slot
  Chunk next_ GUARDED_BY(mutex_);                      // that a thread is to take, but for its end
  int64_t clock_ GUARDED_BY(mutex_) = 0;
  Meter meter_ GUARDED_BY(mutex_);
  bool ends_ GUARDED_BY(mutex_) = false;
  int64_t failed_ GUARDED_BY(mutex_) = kNone;  // the first that could not be read, of those that are wanted
  std::exception_ptr error_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace overspill::inference
