// Spilled gradients between backward and the update: a fixed number of buffers of one chunk each, through
// which they go to NVMe. They come back when a later micro-batch adds to them or a call reads them, and are
// written again. For the update the ring reads the last version, together with the states.
//
// A gradient's extent is not a state: no checkpoint has it, and a crash loses it anyway. So the old one is
// released before the new one is written, not after.
//
// Back pressure. open() waits until a buffer is free, and so for the store alone. Only staging uses these
// buffers; a holder gives its buffer back without waiting for another (Gradients lets one caller at a time
// hold at most half of them), and staging writes out the buffers that nobody holds. The ring never waits for
// a buffer, and no thread that holds a ring slot waits for one, so the two cannot deadlock.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

/// Methods give up the engine's mutex while they wait, and while the store makes room. One caller at a time,
/// which Gradients ensures. Errors: a failed transfer fails the engine, and waits then throw EngineFailed.
/// StoreError where the store has no room for a write: every gradient is still in its buffer, and the call
/// may be repeated.
class GradientStaging {
 public:
  GradientStaging(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model);

  /// How many chunks may be held at a time.
  int64_t held_most() const;

  /// Holds a chunk's buffer until close(). Its content, where the chunk has one, arrives by wait().
  std::byte* open(int32_t chunk) MAY_RELEASE(engine_mutex);
  void wait(int32_t chunk) MAY_RELEASE(engine_mutex);

  enum class Closing : uint8_t {
    unchanged,
    changed,   // more is expected: it stays in memory while there is room
    complete,  // changed, and nothing more is expected soon: it is written out
  };
  void close(int32_t chunk, Closing closing) MAY_RELEASE(engine_mutex);

  /// Returns once every gradient is on NVMe and no buffer is in use.
  void flush() MAY_RELEASE(engine_mutex);

  /// Forgets the gradients of the chunks for which `is_gone` is true, except those that a scheduled update
  /// still needs.
  void discard(const std::function<bool(int32_t chunk)>& is_gone) MAY_RELEASE(engine_mutex);

 private:
  enum class State : uint8_t { free, reading, open, writing };
  struct Buffer {
    GradientStaging* owner = nullptr;
    std::byte* memory = nullptr;
    int32_t chunk = -1;
    State state = State::free;
    bool held = false;
    bool changed = false;
    int64_t last_use = 0;
    io::Transfer transfer;
  };

  static void on_transfer(io::Transfer& transfer) noexcept;
  Buffer* find(int32_t chunk) REQUIRES(engine_mutex);
  Buffer* find(State state) REQUIRES(engine_mutex);
  Buffer* least_recent() REQUIRES(engine_mutex);
  void begin(Buffer& buffer, int32_t chunk) REQUIRES(engine_mutex);
  void write(Buffer& buffer) MAY_RELEASE(engine_mutex);
  void put_away(Buffer& buffer) MAY_RELEASE(engine_mutex);
  void free(Buffer& buffer) REQUIRES(engine_mutex);

  const Setup& setup_;
  Core& core_;
  ModelStates& model_;
  HostMemory memory_;
  std::vector<Buffer> buffers_ GUARDED_BY(engine_mutex);
  int64_t uses_ GUARDED_BY(engine_mutex) = 0;
};

}  // namespace overspill::engine
