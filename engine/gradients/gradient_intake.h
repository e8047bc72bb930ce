// Takes gradients into the engine. For a gradient in host memory the caller's thread does it. A gradient in
// device memory is copied by the intake's own stream, once the caller's queue has computed it, and taken in
// by the intake's own thread. It goes straight to its place where nothing has to be added or widened, or
// where the device has added up the micro-batches (device_accumulators.h); the device squares it then.
// Otherwise it goes through a few pinned slots: some pieces are copied while the workers add others. So the
// caller goes on with backward, and step() finds all sums of squares ready except the last gradient's.
//
// The intake takes gradients in the order of the calls, one after the other, whatever threads make them. The
// bits are the same as if each call had waited.
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

/// The most device memory of the framework that gradients under way may keep. It grows with the device's
/// budget, so that the gradients of a large head need not wait until nothing else is under way.
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

  /// Returns when the gradient is taken in. Throws as Gradients::check.
  void add(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype)
      EXCLUDES(arrival_, mutex_, engine_mutex);
  /// The gradient is the result of the work submitted to `queue` until now. Returns at once, unless much is
  /// under way already. Throws std::invalid_argument for a wrong size or dtype; a later failure fails the
  /// engine.
  void add(int32_t unit, int32_t segment, DeviceArray gradient, Queue queue)
      EXCLUDES(arrival_, mutex_, engine_mutex);
  // A gradient that comes in parts (gradient_parts.h), from host memory and of one rank.
  Gradients::Arrival begin_parts(int32_t unit, int32_t segment, optim::Element element)
      EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Pieces end where Gradients::piece_end says, or at the end of another chunk.
  void add_parts(std::span<const Gradients::Piece> pieces) EXCLUDES(arrival_, mutex_, engine_mutex);
  void finish_parts(const Gradients::Arrival& arrival) EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Replaces the segment's gradient, or removes it where `data` is empty.
  void replace(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype)
      EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Writes the zeros that Gradients::become_zero() has promised.
  void write_zeros() EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Returns when all gradients given are taken in, or the engine has failed. Sums that the device has made
  /// are on the host then.
  void finish() EXCLUDES(arrival_, mutex_, engine_mutex);
  /// Whether the caller is this object's own thread: where it gives a gradient's memory back, the owner's
  /// finalizer may run other code there.
  bool here() const;
  /// Drops gradients that are not taken in yet. Nothing may be added afterwards.
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
