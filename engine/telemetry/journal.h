// Records, on request, what happened to which buffer and when: for the examples, for traces, and for tests of
// the schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/device.h"

namespace overspill::engine {

enum class Happening : uint8_t {
  forward,     // begin_pass() of a training pass
  backward,    // begin_backward()
  acquired,    // a unit's weights were leased
  waiting,     // a caller waits, for this unit if there is one
  resumed,     // it goes on
  stepped,     // step() has decided
  freed,       // a unit's gathered block was given up
  gathering,   // a unit's block was taken, reads begin
  gathered,    // its weights are all there
  gradient,    // a segment's gradient arrived
  summing,     // the ranks begin to add up a unit's gradients
  summed,      // this rank has its part of the sum
  scheduled,   // step() scheduled a chunk's update
  reading,     // states: extents -> slot
  staged,      // states are in the slot
  updating,    // a worker began the update
  updated,     // weights are new
  guessing,    // a worker began an update whose factors are guessed
  guessed,     // the guessed version is there
  writing,     // slot -> new extents
  written,     // the slot is free
  disk_busy,   // a read (chunk 0) or a write (1) of the schedule was submitted, and none was under way before
  disk_rests,  // the last of them has ended
};

const char* happening_name(Happening happening);

struct JournalEntry {
  int64_t time_ns = 0;  // steady clock
  Happening happening = Happening::acquired;
  int32_t unit = -1;
  int32_t chunk = -1;
  int32_t slot = -1;  // of `waiting`: the Cause (telemetry/report.h)
};

/// What the device did, by its own events.
struct DeviceSpan {
  enum class Kind : uint8_t {
    copy_up,    // a unit's weights, from the host
    compute,    // what a caller's queue was given while it had the unit's lease
    copy_down,  // a gradient, or a piece of one, to the host
    update,     // of a unit that lives there
  };
  Kind kind = Kind::copy_up;
  int32_t unit = -1;
  const void* queue = nullptr;  // the caller's, of `compute`
  int64_t begin_ns = 0;         // steady clock
  int64_t end_ns = 0;
};

const char* span_name(DeviceSpan::Kind kind);

/// Work that may still be under way.
struct DeviceWork {
  DeviceSpan span;  // without its times
  kernels::Event begin;
  kernels::Event end;
};

/// Waits for the work; returns its spans sorted by their beginning, without work for which the device has no
/// times.
std::vector<DeviceSpan> resolve(const std::vector<DeviceWork>& work);

/// Guarded by the owner's mutex. When off, a note costs one branch.
class Journal {
 public:
  void enable(bool on) { on_ = on; }
  bool on() const { return on_; }
  void note(Happening happening, int32_t unit, int32_t chunk = -1, int32_t slot = -1) {
    if (on_) add(happening, unit, chunk, slot);
  }
  /// An event to pass as `begin` to the next note(); empty where the journal is off.
  kernels::Event begin(kernels::Stream& stream) const { return on_ ? stream.record() : kernels::Event(); }
  /// Notes nothing unless `begin` was recorded while the journal was on.
  void note(DeviceSpan::Kind kind, int32_t unit, const kernels::Event& begin, const kernels::Event& end,
            const void* queue = nullptr);
  std::vector<JournalEntry> take();
  std::vector<DeviceWork> take_work();

 private:
  void add(Happening happening, int32_t unit, int32_t chunk, int32_t slot);
  bool on_ = false;
  std::vector<JournalEntry> entries_;
  std::vector<DeviceWork> work_;
};

}  // namespace overspill::engine
