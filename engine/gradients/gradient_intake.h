// Gradients on their way into the engine. Those in host memory are taken in by whoever brings them. Those in
// device memory are copied by a stream of their own, as soon as the caller's queue has made them, and taken
// in by a thread of their own: straight to their place where nothing has to be added or widened, or where the
// device has added them up (device_accumulators.h), else through a few pinned slots, some pieces being copied
// while the workers add others. The device squares what goes straight to its place. So the caller goes on
// with backward, and step() finds the sum of squares ready but for the last gradient's.
//
// They are taken in in the order in which they came, one after the other whatever threads bring them: every
// bit is as if each had been waited for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/base/device_array.h"
#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/queues.h"
#include "engine/gradients/gradients.h"
#include "engine/plan/setup.h"
#include "engine/states/updater.h"

namespace overspill::engine {

/// Of device memory, which is the framework's, that gradients under way may keep: more on a larger card, so
/// that those of a large head do not wait until nothing else is under way.
constexpr int64_t outstanding_bytes_most(int64_t device_budget_bytes) {
  return std::max(int64_t{256} << 20, device_budget_bytes / 64);
}

class GradientIntake {
 public:
  GradientIntake(const Setup& setup, Core& core, Hardware& hardware, Queues& queues, Updater& updater,
                 Gradients& gradients);
  GradientIntake(const GradientIntake&) = delete;
  GradientIntake& operator=(const GradientIntake&) = delete;
  ~GradientIntake() { close(); }

  /// Returns when it is taken in. Throws as Gradients::check.
  void add(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype)
      EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Of what was submitted to `queue` until now. Returns at once, unless much is under way already. Throws
  /// std::invalid_argument for what does not fit; what fails later fails the engine.
  void add(int32_t unit, int32_t segment, DeviceArray gradient, Queue queue)
      EXCLUDES(arrival_, mutex_, engine_mutex);
  /// In place of what there was of the segment; empty: nothing.
  void replace(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype)
      EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Writes the zeros of what Gradients::become_zero() has left.
  void write_zeros() EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Returns when all that was given is taken in, or the engine has failed.
  /// What the device has added up is on the host then.
  void finish() EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Whether the caller is this object's own thread: where it gives a gradient's memory back, the owner's
  /// finalizer may run other code there.
  bool here() const;
  /// What has not been taken in is dropped. Nothing may be added afterwards.
  void close() noexcept EXCLUDES(mutex_);

 private:
  struct Item {
    Gradients::Arrival arrival;  // whether it is the first is known once it has begun
    DeviceArray gradient;
    int64_t elements = 0;
    kernels::Event ready;  // on the caller's queue
    bool timed = false;    // the journal is on
  };
  struct Piece {
    Item* item = nullptr;
    int64_t begin = 0;
    int64_t elements = 0;
    int slot = -1;  // -1: at its place already
    bool last = false;
    kernels::Event copied;
    kernels::Event squared;

    bool done() const { return copied.done() && squared.done(); }
    void wait() const {
      copied.wait();
      squared.wait();
    }
  };
  /// In device memory.
  struct Source {
    const std::byte* data = nullptr;
    int64_t width = 0;  // of an element
  };

  void take_all_in() REQUIRES(arrival_) EXCLUDES(engine_mutex);
  bool make_ready(int32_t unit, int32_t segment) EXCLUDES(engine_mutex);
  bool is_zero(int32_t unit, int32_t segment) EXCLUDES(engine_mutex);
  void let_go(int32_t unit) EXCLUDES(engine_mutex);
  void take_in(int32_t unit, int32_t segment, optim::Element element, std::span<const std::byte> data);
  void taken_in(int32_t unit, int32_t segment) EXCLUDES(engine_mutex);
  bool on_device() const { return stream_ != nullptr; }
  void run() noexcept EXCLUDES(mutex_);
  bool next(std::unique_ptr<Item>& item) EXCLUDES(mutex_);
  void submit(std::unique_ptr<Item> item);
  void copy(Item& item, Source from, int64_t begin, int64_t elements, std::byte* to, int slot);
  void complete_some();
  void complete_item();
  int take_slot();
  void free_all_slots();
  bool arriving(const Item& item) const;
  void abandon() noexcept EXCLUDES(mutex_);
  void forget(int64_t bytes) EXCLUDES(mutex_);

  const Setup& setup_;
  Core& core_;
  Queues& queues_;
  Updater& updater_;
  Gradients& gradients_;
  // Of the thread:
  LinkedMemory slots_;
  std::unique_ptr<kernels::Stream> stream_;
  std::vector<int> idle_slots_;
  std::deque<std::unique_ptr<Item>> items_;              // begun, oldest first
  std::deque<Piece> pieces_;                             // being copied, oldest first
  std::vector<Gradients::Piece> arrived_;                // of complete_some(), kept for its memory
  Mutex arrival_ ACQUIRED_BEFORE(mutex_, engine_mutex);  // one gradient is given at a time
  Mutex mutex_;
  Condition changed_;
  std::deque<std::unique_ptr<Item>> waiting_ GUARDED_BY(mutex_);
  int64_t outstanding_ GUARDED_BY(mutex_) = 0;  // given and not taken in
  int64_t outstanding_bytes_ GUARDED_BY(mutex_) = 0;
  bool closing_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // where the device has memory of its own
};

}  // namespace overspill::engine
