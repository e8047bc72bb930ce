// What happened to which buffer when, recorded on request: for the examples, for traces people look at, for
// tests of the schedule.
#pragma once

#include <cstdint>
#include <vector>

namespace overspill::engine {

enum class Happening : uint8_t {
  acquired,   // a unit's weights were leased
  waiting,    // a caller waits, for this unit if there is one
  resumed,    // it goes on
  stepped,    // step() has decided
  freed,      // a unit's gathered block was given up
  gathering,  // a unit's block was taken, reads begin
  gathered,   // its weights are all there
  gradient,   // a segment's gradient arrived
  scheduled,  // step() scheduled a chunk's update
  reading,    // states: extents -> slot
  staged,     // states are in the slot
  updating,   // a worker began the update
  updated,    // weights are new
  guessing,   // a worker began an update whose factors are guessed
  guessed,    // the guessed version is there
  writing,    // slot -> new extents
  written,    // the slot is free
};

const char* happening_name(Happening happening);

struct JournalEntry {
  int64_t time_ns = 0;  // steady clock
  Happening happening = Happening::acquired;
  int32_t unit = -1;
  int32_t chunk = -1;
  int32_t slot = -1;
};

/// Guarded by the owner's mutex. Off, it costs a branch.
class Journal {
 public:
  void enable(bool on) { on_ = on; }
  void note(Happening happening, int32_t unit, int32_t chunk = -1, int32_t slot = -1) {
    if (on_) add(happening, unit, chunk, slot);
  }
  std::vector<JournalEntry> take();

 private:
  void add(Happening happening, int32_t unit, int32_t chunk, int32_t slot);
  bool on_ = false;
  std::vector<JournalEntry> entries_;
};

}  // namespace overspill::engine
