// The lazy update (DESIGN 5): chunks in forward order, each as its states arrive; states read ahead into a
// ring of slots, new versions written behind from the same slots. No thread of its own: it moves on at every
// completion, and when step() or a waiting caller asks.
//
// Every method needs the context's mutex.
#pragma once

#include <array>
#include <mutex>
#include <span>
#include <vector>

#include "cpu_optim/update.h"
#include "engine/schedule/context.h"
#include "engine/schedule/gather.h"
#include "engine/schedule/speculation.h"
#include "io/sealed.h"

namespace overspill::engine {

class Updater final : private SlotOwner {
 public:
  Updater(Context& context, Gatherer& gatherer);
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  /// step() has decided: these chunks (in the order given) are updated from now on. All earlier updates are
  /// done. Guesses whose factors were right are taken, all others dropped.
  void schedule(std::span<const int32_t> chunks);
  /// step() has decided that nothing is updated.
  void skip();

  /// The unit's gradients are final as far as anybody knows: its chunks may be updated before step() decides.
  void guess(int32_t unit);
  /// Drops what was guessed for the unit; returns once nobody reads its gradients.
  void take_back(std::unique_lock<std::mutex>& lock, int32_t unit);
  void take_back_all(std::unique_lock<std::mutex>& lock);
  int64_t guesses_unfinished() const;
  Speculation& speculation() { return speculation_; }

  /// Starts whatever can start: reads, updates, read-ahead.
  void pump();

  /// Returns once every scheduled update is done and written, and nothing is staged: components may be
  /// reached at their homes. Read-ahead stays off until resume().
  void quiesce(std::unique_lock<std::mutex>& lock);
  void resume() { ahead_allowed_ = context_.config.prefetch_units > 0; }

  /// Returns once the unit's weights are up to date.
  void wait_for(std::unique_lock<std::mutex>& lock, int32_t unit);
  /// Returns once every scheduled update is done; its writes may go on.
  void finish(std::unique_lock<std::mutex>& lock);

  int64_t pending() const { return pending_; }

 private:
  struct Slot {
    Updater* owner = nullptr;
    std::byte* memory = nullptr;
    int32_t index = 0;
    int32_t chunk = -1;
    int32_t in_flight = 0;  // transfers, and copies of weights from the slot; at rest 0
    std::array<io::Transfer, kComponents> transfers;
    std::vector<io::Sealed>
        states;             // by component; weights are checked on arrival, since others use them too
    io::Transfer gradient;  // a spilled one; read once its step is decided, memory null until then
  };

  void lend(int32_t chunk) override;
  void returned(int32_t chunk) override;
  static void on_transfer(io::Transfer& transfer) noexcept;
  template <class Fits>
  int32_t first_demanded(Fits fits) const;
  void check_slots() const;
  bool stage_next();
  int32_t next_to_stage();
  int32_t next_ahead();
  Slot* take_slot(bool may_drop_copies);
  void stage(int32_t chunk, Slot& slot);
  void stage_gradient(int32_t chunk, Slot& slot);
  int32_t next_guess();
  bool dispatch_next();
  int32_t next_ready() const;
  bool is_ready(int32_t chunk) const;
  void dispatch(int32_t chunk);
  bool is_guessed_at_home(int32_t chunk) const { return context_.plan.held_twice[chunk]; }
  struct Work;
  using Extents = std::array<io::Extent, kComponents>;  // one of each component in the store
  void update(Work work);
  Extents allocate(int32_t chunk);
  void release(const Extents& extents);
  void run(int32_t chunk) noexcept;
  void updated(int32_t chunk);
  void guessed(std::unique_lock<std::mutex>& lock, int32_t chunk, const Extents& fresh);
  void guessed_at_home(int32_t chunk);
  bool decide(int32_t chunk, bool right);
  void judge(const ScheduleStats& before);
  void take(ChunkState& state);
  void drop(ChunkState& state);
  void adopt(ChunkState& state);
  void end_guess(ChunkState& state);
  void write_back(int32_t chunk, Slot& slot, const Extents& fresh);
  void transferred(Slot& slot);
  void free_slot(Slot& slot);
  bool at_rest() const;

  Context& context_;
  Gatherer& gatherer_;
  Speculation speculation_;
  HostMemory memory_;
  std::vector<Slot> slots_;
  std::vector<int32_t> ring_queue_;      // chunks that need a slot, in the order of the update
  std::vector<int32_t> resident_queue_;  // chunks wholly on the host
  std::vector<int32_t> ahead_;           // the last step's ring_queue_: what will be needed first
  std::vector<int32_t> guesses_;         // chunks whose updates may be guessed, since the last step
  std::vector<int32_t> guessed_;         // the last step's guesses_ that NVMe has part of
  std::vector<int32_t> unread_guesses_;  // of guesses_, those whose states may have to be read yet
  std::vector<int32_t> home_guesses_;    // of guesses_, those of chunks wholly on the host, to be made yet
  size_t next_staged_ = 0;               // in ring_queue_
  size_t next_resident_ = 0;             // in resident_queue_
  size_t next_ahead_ = 0;                // in ahead_ or guessed_
  int64_t pending_ = 0;
  int running_ = 0;
  bool ahead_allowed_ = false;
};

/// One chunk's components where their newest version is in memory: in the ring slot, or at home.
struct ChunkMemory {
  std::array<std::byte*, kComponents> component{};
  int64_t index = 0;  // of the chunk's first element in its unit, over all ranks
  uint64_t seed = 0;
};

/// The fused pass over elements begin <= i < end of one chunk, segment by segment: `factors` and `present`
/// are the unit's, by segment. No locks: the caller has exclusive use of the chunk.
void update_chunk(const Unit& unit, const Chunk& chunk, std::span<const optim::Factors> factors,
                  std::span<const uint8_t> present, const ChunkMemory& memory, optim::Gradient gradients,
                  optim::Range within);

}  // namespace overspill::engine
