// Keeps gradients from their arrival in backward until they are cleared or replaced. Each trainable unit has
// one array in its flat space; a unit with gradients spilled to NVMe has one per chunk (gradient_staging.h).
// A segment's gradient is the stored values times the segment's factor.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu_optim/gradient.h"
#include "engine/base/group_range.h"
#include "engine/collectives/rank_groups.h"
#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/device/device_accumulators.h"
#include "engine/device/device_units.h"
#include "engine/device/gradient_squares.h"
#include "engine/gradients/gradient_staging.h"
#include "engine/gradients/gradient_sums.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

/// A summary of the final gradients, accumulated and summed over ranks; the same bits on every rank.
struct GradientSummary {
  double squares = 0;  // infinite where a gradient is not finite
  bool finite = true;
};

/// Whether a segment has a gradient for the next step.
enum class Presence : uint8_t {
  absent,
  used,   // the last step used it; its memory still holds it
  zero,   // all zeros, which were not written yet
  there,  // it arrived since the last step, or since clear()
};

class Gradients {
 public:
  Gradients(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, RankGroups& ranks,
            DeviceUnits& device_units, GradientSquares& squares);

  // A gradient is added piece by piece: check, begin, all pieces, finish. The caller ensures that no update
  // of the unit is pending, and that at most one gradient of a segment is between begin and finish.

  /// A gradient that arrives, of one segment; `first`: in this step.
  using Arrival = DeviceUnits::Arrival;
  /// The element type of a gradient of `bytes` bytes. The dtype must be the unit's, or "F32". Throws
  /// std::invalid_argument for another size or dtype.
  optim::Element check(int32_t unit, int32_t segment, int64_t bytes, std::string_view dtype) const;
  /// The same of the dtype alone.
  optim::Element check(int32_t unit, int32_t segment, std::string_view dtype) const;
  /// With several ranks it may wait for room.
  Arrival begin(int32_t unit, int32_t segment, optim::Element element) EXCLUDES(engine_mutex);
  /// Where the piece that begins at an element of the segment ends, at most: pieces keep to chunks.
  int64_t piece_end(const Arrival& arrival, int64_t begin) const;
  /// A part of an arrival: `elements` elements of the segment from `begin` on, contiguous in host memory.
  struct Piece {
    const Arrival* arrival;
    int64_t begin;
    int64_t elements;
    const std::byte* data;

    const std::byte* at(int64_t in_segment) const {
      return data + (in_segment - begin) * optim::bytes(arrival->element);
    }
  };
  /// Takes pieces in, in parallel: no two have the same elements. Waits for the disk where staging is full.
  /// One call at a time.
  void add(std::span<const Piece> pieces) EXCLUDES(turn_, engine_mutex);
  void finish(const Arrival& arrival) EXCLUDES(engine_mutex);
  /// Which of a segment's arrivals is the last one: another once the next has begun, or all are forgotten.
  struct Mark {
    uint64_t forgotten = 0;
    int64_t arrivals = 0;
    friend bool operator==(const Mark&, const Mark&) = default;
  };
  Mark mark(int32_t unit, int32_t segment) EXCLUDES(engine_mutex);
  /// In place of finish(). `pieces`: some have come; then the segment has no gradient now, and where they
  /// were added to others' the next step is refused until gradients are cleared. Nothing where `of`, which
  /// mark() gave after begin(), is over.
  void break_off(const Arrival& arrival, const Mark& of, bool pieces) EXCLUDES(engine_mutex);
  /// Throws std::invalid_argument where a gradient of these groups was added in part to those of earlier
  /// micro-batches.
  void require_whole_sums(GroupRange range) EXCLUDES(engine_mutex);
  /// Pinned host memory that the arrival may be copied to as it is, in place of add(); null: there is none.
  std::byte* place_of(const Arrival& arrival) const;
  /// For an arrival that is copied to its place: where possible, the device squares it once `ready` is
  /// reached. The event is reached when that is done.
  kernels::Event square_there(const Arrival& arrival, const std::byte* data, const kernels::Event& ready);
  struct TakenInThere {
    kernels::Event taken;            // the gradient's memory is free
    kernels::Event squared = {};     // and what is there was squared
    const std::byte* sum = nullptr;  // fp32, in device memory: has to be copied to `home`, once `taken`
    std::byte* home = nullptr;       // pinned host memory
  };
  /// Used in place of add(): takes in a whole gradient from device memory, once `ready` is reached. Nothing
  /// where the gradient has to pass through the host.
  std::optional<TakenInThere> take_in_there(const Arrival& arrival, const std::byte* data,
                                            const kernels::Event& ready) EXCLUDES(engine_mutex);
  /// Copies sums on the device that the host lacks to the host. No gradient may be in the middle of its
  /// intake.
  void bring_down() EXCLUDES(engine_mutex);
  /// Waits for all work started on the device. Another call reports its failure.
  void settle_there() noexcept;
  /// Whether bring_down() has something to do for the unit.
  bool ahead_there(int32_t unit) const REQUIRES(engine_mutex) { return accumulators_.ahead(unit); }
  /// Whether begin() may have to wait for an arrival that is not finished.
  bool may_wait(int32_t unit) const;

  /// While it lives, gradients of groups outside its range keep their memory but count as absent in all other
  /// methods. No gradients may arrive meanwhile. With one rank only, unless the range is all.
  class Only {
   public:
    Only(Gradients& gradients, GroupRange range);
    ~Only();
    Only(const Only&) = delete;
    Only& operator=(const Only&) = delete;

   private:
    Gradients& gradients_;
    const bool all_;
  };

  Presence presence(int32_t unit, int32_t segment) const REQUIRES(engine_mutex) {
    return presence_[unit][segment];
  }
  /// Whether the next step updates it.
  bool present(int32_t unit, int32_t segment) const REQUIRES(engine_mutex) {
    return presence(unit, segment) >= Presence::zero;
  }
  bool any() EXCLUDES(engine_mutex);  // whether any segment is present
  /// Throws all gradients away, except those that a scheduled update needs.
  void clear() EXCLUDES(turn_, engine_mutex);
  /// clear() if a gradient is present. If not, throws away only the gradients that the last step used, and
  /// leaves the sums over ranks as they are.
  void throw_away() EXCLUDES(turn_, engine_mutex);
  /// Throws the segment's gradient away. No update of the unit may be pending.
  void drop(int32_t unit, int32_t segment) REQUIRES(engine_mutex);
  /// Makes zeros of all gradients that are present or that the last step used.
  void become_zero() EXCLUDES(turn_, engine_mutex);
  /// Makes the gradients that the last step used present again, unless others came meanwhile. With one rank
  /// only.
  void reuse() EXCLUDES(engine_mutex);

  /// Multiplies all present gradients.
  void scale(double factor) EXCLUDES(engine_mutex);
  double factor(int32_t unit, int32_t segment) const REQUIRES(engine_mutex) {
    return factors_[unit][segment];
  }
  /// Multiplies the segment's stored values by its factor, which becomes 1; needed before adding to them. No
  /// update of the unit may be pending.
  void apply_factor(int32_t unit, int32_t segment) EXCLUDES(turn_, engine_mutex);

  /// Writes spilled gradients out, so that the ring may read them, and returns when they are written. Throws
  /// StoreError where the disk has no room: nothing is lost, and the call may be repeated.
  void put_away() EXCLUDES(turn_, engine_mutex);
  /// Hands the present gradients over to the scheduled updates. A gradient stays until clear(), or until the
  /// first add() to its segment. Gradients that an earlier step used are gone.
  void handed_over() REQUIRES(engine_mutex);

  /// The sums over several ranks.
  GradientSums& sums() { return sums_; }
  /// Called when all units are summed: afterwards present() is true where any rank had a gradient.
  /// Collective.
  void reduce_presence() EXCLUDES(engine_mutex);

  /// Adds up the squares of the present gradients, chunk by chunk in global order. A parameter that several
  /// model ranks hold counts once. Collective, over the model ranks too (RankGroups::model_ranks).
  GradientSummary summarize() EXCLUDES(engine_mutex);
  /// After a summary that was not finite: the name of the first segment of this rank's shard that has an inf
  /// or a NaN; empty: none has.
  std::string first_not_finite() EXCLUDES(engine_mutex);
  /// Reads all gradients. With one rank only.
  bool any_nan() EXCLUDES(engine_mutex);

  /// Copies the segment's elements from `begin` on, as fp32. World 1.
  void read(int32_t unit, int32_t segment, int64_t begin, std::span<float> out) EXCLUDES(turn_, engine_mutex);

 private:
  /// The part of a segment that lies in one chunk, in elements.
  struct Part {
    int32_t chunk;  // -1: of several ranks' gradients, which lie in no chunk until they are summed
    int32_t run;    // in the chunk
    int64_t in_chunk;
    int64_t in_segment;
    int64_t elements;
    // While the part is worked on:
    const Piece* piece = nullptr;
    std::byte* memory = nullptr;  // of the chunk's first element
    optim::Element element{};     // there
    optim::Element was{};         // before
    bool widen = false;           // the chunk has to become fp32 first
  };
  static constexpr int64_t kBatchMost = 8;  // parts worked on side by side

  optim::Element element(int32_t unit) const;  // of a trainable one
  std::byte* at(int32_t unit, int64_t element) const;
  void add(const Arrival& arrival, int64_t begin, int64_t elements, const std::byte* data)
      EXCLUDES(turn_, engine_mutex);
  void add_there(const Piece& piece) EXCLUDES(engine_mutex);
  void forget_sum_there(const Arrival& arrival) EXCLUDES(engine_mutex);
  void cut(const Piece& piece, std::vector<Part>& parts) const;
  void add_whole(const Part& part) EXCLUDES(engine_mutex);
  void add_by_chunk(std::span<Part> parts) EXCLUDES(turn_, engine_mutex);
  void choose_element(Part& part) REQUIRES(engine_mutex);
  void add_batch(std::span<Part> parts) REQUIRES(turn_) EXCLUDES(engine_mutex);
  void work_on(std::span<const Part> parts, const std::function<void(int64_t)>& work);
  bool lies_whole(int32_t unit) const {
    return setup_.layout.slices > 1 || setup_.gradient_route(unit) == GradientRoute::whole;
  }
  bool is_last(const Arrival& arrival) const REQUIRES(engine_mutex);
  void forget_squares(const Arrival& arrival);
  bool complete(const Chunk& chunk) const REQUIRES(engine_mutex);
  bool is_there(int32_t unit, int32_t segment) const REQUIRES(engine_mutex) {
    return presence(unit, segment) == Presence::there;
  }
  bool is_empty(const Chunk& chunk) const REQUIRES(engine_mutex);
  bool any_present() const REQUIRES(engine_mutex);
  /// By which a gradient that is there is multiplied; nothing where there is none.
  std::optional<double> factor_of(int32_t unit, int32_t segment) EXCLUDES(engine_mutex);
  void read_unscaled(int32_t unit, int32_t segment, int64_t begin, std::span<float> out)
      EXCLUDES(turn_, engine_mutex);
  void forget() REQUIRES(turn_) MAY_RELEASE(engine_mutex);
  bool is_aside(int32_t unit) const REQUIRES(engine_mutex);
  optim::Squares squares_of_chunk(int32_t chunk) EXCLUDES(engine_mutex);
  optim::Squares squares_of_run(int32_t chunk, size_t run) const;
  template <class Visit>
  void for_each_part(int32_t unit, int32_t segment, Visit visit) const;

  const Setup& setup_;
  Core& core_;
  Hardware& hardware_;
  ModelStates& model_;
  RankGroups& ranks_;
  DeviceUnits& device_units_;
  GradientSquares& squares_;
  DeviceAccumulators accumulators_;
  uint64_t forgotten_ GUARDED_BY(engine_mutex) = 0;  // how often
  GroupRange only_ GUARDED_BY(engine_mutex);         // of the Only that lives, else all
  /// Units and segments whose sums have a gradient in part.
  std::vector<std::pair<int32_t, int32_t>> half_added_ GUARDED_BY(engine_mutex);
  std::vector<std::vector<Presence>> presence_ GUARDED_BY(engine_mutex);  // by unit and segment
  /// The same for the gradients that Only hides; else empty.
  std::vector<std::vector<Presence>> aside_ GUARDED_BY(engine_mutex);
  std::vector<std::vector<double>> factors_ GUARDED_BY(engine_mutex);
  std::vector<optim::Squares> by_chunk_;
  std::vector<std::array<double, 2>> by_slice_;  // of this rank's shard
  GradientStaging staging_ GUARDED_BY(turn_);
  GradientSums sums_;
  Mutex turn_ ACQUIRED_BEFORE(engine_mutex);  // held by the thread that uses staging
  /// By unit and segment, since the last step.
  std::vector<std::vector<int32_t>> arrivals_ GUARDED_BY(engine_mutex);
  std::vector<Part> whole_parts_, chunk_parts_;  // of add(), kept for their memory
};

template <class Visit>
void Gradients::for_each_part(int32_t unit, int32_t segment, Visit visit) const {
  for_each_run(setup_.layout, unit, segment, [&](int32_t c, int32_t r, int64_t in_segment) {
    const Run& run = setup_.layout.chunks[c].runs[r];
    visit(Part{c, r, run.begin, in_segment, run.elements});
  });
}

}  // namespace overspill::engine
