// The only access to the store. Long calls run there without the engine's mutex; close() takes the store away
// once the last of them has returned.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "engine/core/monitor.h"
#include "engine/telemetry/journal.h"
#include "engine/telemetry/report.h"
#include "io/stall_watch.h"
#include "io/store.h"

namespace overspill::engine {

class StoreGate {
 public:
  /// `store` may be null where the plan puts nothing on NVMe, `watch` where nothing is to be watched.
  /// `monitor`, `meter` and `journal` outlive the gate.
  StoreGate(Monitor& monitor, StepMeter& meter, Journal& journal, std::unique_ptr<io::Store> store,
            std::shared_ptr<io::StallWatch> watch)
      : monitor_(monitor),
        meter_(meter),
        journal_(journal),
        store_(std::move(store)),
        watch_(std::move(watch)) {}
  StoreGate(const StoreGate&) = delete;
  StoreGate& operator=(const StoreGate&) = delete;

  // Workers and the checkpoint's caller go to the store by these without being counted: close() has ended
  // them before it calls take().
  bool exists() const { return store_ != nullptr; }
  io::Store* operator->() const { return store_.get(); }
  io::Store& operator*() const { return *store_; }
  io::Store* get() const { return store_.get(); }
  io::StallWatch* watch() const { return watch_.get(); }

  /// As Store::poll, without the mutex. False without a store.
  bool poll() MAY_RELEASE(engine_mutex);
  /// As Store::reserve, for all but what reserve_more() has added.
  void reserve(int64_t bytes) EXCLUDES(engine_mutex);
  /// Makes room for `bytes` more, without the mutex. Throws StoreError; then nothing has changed.
  void reserve_more(int64_t bytes) MAY_RELEASE(engine_mutex);
  /// As Store::allocate, without the mutex, since it may wait for the disk. Throws StoreError.
  io::Extent allocate(int64_t bytes) MAY_RELEASE(engine_mutex);
  /// Hands a transfer of the schedule to the store; the report counts it until its on_complete says so.
  void submit(io::Transfer& transfer) REQUIRES(engine_mutex);
  void completed(const io::Transfer& transfer) REQUIRES(engine_mutex);
  /// Called when the journal begins to take notes: what is under way by then began before them.
  void note_under_way() REQUIRES(engine_mutex);
  /// Releases the extent, unless it is empty, and empties the variable.
  void give_up(io::Extent& extent) REQUIRES(engine_mutex);

  /// Keeps the store for a caller that uses it directly, without the mutex: take() waits until the object is
  /// gone. The constructor throws as Monitor::check() does, so nobody uses a store that was given up.
  class Kept {
   public:
    explicit Kept(StoreGate& gate) EXCLUDES(engine_mutex);
    ~Kept() EXCLUDES(engine_mutex);
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

   private:
    StoreGate& gate_;
  };
  /// Takes the store once poll(), allocate() and every Kept have ended. The caller makes sure that no new
  /// ones begin.
  std::unique_ptr<io::Store> take() MAY_RELEASE(engine_mutex);

 private:
  class Inside;
  void leave() REQUIRES(engine_mutex);

  Monitor& monitor_;
  StepMeter& meter_ GUARDED_BY(engine_mutex);
  Journal& journal_ GUARDED_BY(engine_mutex);
  std::array<int64_t, 2> under_way_ GUARDED_BY(engine_mutex){};  // reads and writes of the schedule
  std::unique_ptr<io::Store> store_;
  const std::shared_ptr<io::StallWatch> watch_;
  int64_t reserved_bytes_ GUARDED_BY(engine_mutex) = 0;
  int64_t more_bytes_ GUARDED_BY(engine_mutex) = 0;  // by reserve_more()
  int inside_ GUARDED_BY(engine_mutex) = 0;          // callers who are in the store without the mutex
};

}  // namespace overspill::engine
