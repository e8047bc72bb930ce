// A device around another, for tests that watch it or let it fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "kernels/device.h"
#include "kernels/device_kernels.h"

namespace overspill::testing {

/// Host memory that is pinned now. Thread-safe; the device outlives the pins.
class HostPins {
 public:
  kernels::HostPin keep(kernels::HostPin pin) {
    if (pin.data() == nullptr) return pin;
    void* const data = pin.data();
    const int64_t bytes = pin.bytes();
    const std::lock_guard lock(mutex_);
    pins_[pin.data()] = std::move(pin);
    const auto release = [](void* pins, void* pinned, int64_t) noexcept {
      static_cast<HostPins*>(pins)->forget(static_cast<std::byte*>(pinned));
    };
    return {data, bytes, release, this};
  }
  bool pinned(const void* data, int64_t bytes) const {
    const std::lock_guard lock(mutex_);
    const auto* const begin = static_cast<const std::byte*>(data);
    const auto after = pins_.upper_bound(begin);
    if (after == pins_.begin()) return false;
    const kernels::HostPin& pin = std::prev(after)->second;
    return begin + bytes <= pin.data() + pin.bytes();
  }

 private:
  void forget(const std::byte* data) {
    const std::lock_guard lock(mutex_);
    pins_.erase(data);
  }

  mutable std::mutex mutex_;
  std::map<const std::byte*, kernels::HostPin> pins_;  // by begin
};

/// Of a device around another. What a hook throws is what the call throws.
struct DeviceHooks {
  /// Of a host thread, for an event; done: it will not wait. Also of the thread that submits a copy of host
  /// memory that nobody pinned, for such a copy may keep it until it is done.
  std::function<void(bool done)> before_wait = {};
  std::function<void()> before_record = {};   // of an event, in any stream
  std::function<void()> before_adopted = {};  // a call of a stream that is somebody else's queue
  std::function<bool()> after_look =
      {};  // at an event that is not reached; true: it is before the look returns
  std::function<kernels::Event()> holds_copy = {};         // what the next copy waits for, in its stream
  std::function<void(int64_t bytes)> before_copy = {};     // from the host or to it
  std::function<void(int64_t count)> before_squares = {};  // of so many elements, in one kernel
  std::function<kernels::Event()> holds_update = {};       // what the next update waits for, in its stream
};

class AroundKernels final : public kernels::DeviceKernels {
 public:
  AroundKernels(kernels::DeviceKernels& kernels, std::shared_ptr<const DeviceHooks> hooks)
      : kernels_(kernels), hooks_(std::move(hooks)) {}

  kernels::Formats formats() const override { return kernels_.formats(); }
  void clear(kernels::Stream& stream, void* to, int64_t bytes) override { kernels_.clear(stream, to, bytes); }
  void copy(kernels::Stream& stream, void* to, const void* from, int64_t bytes) override {
    kernels_.copy(stream, to, from, bytes);
  }
  void take_in(kernels::Stream& stream, optim::Element from_type, const void* from, optim::Element to_type,
               void* to, int64_t count, bool first) override {
    kernels_.take_in(stream, from_type, from, to_type, to, count, first);
  }
  void take_mean(kernels::Stream& stream, const float* sum, float factor, optim::Element to_type, void* to,
                 int64_t count, bool first) override {
    kernels_.take_mean(stream, sum, factor, to_type, to, count, first);
  }
  void squares(kernels::Stream& stream, optim::Element type, const void* from, int64_t count,
               kernels::Squares* blocks) override {
    if (hooks_->before_squares) hooks_->before_squares(count);
    kernels_.squares(stream, type, from, count, blocks);
  }
  void update(kernels::Stream& stream, optim::Format format, const optim::Piece& piece,
              optim::Gradient gradient, optim::Range range, const optim::Factors& factors) override {
    if (hooks_->holds_update) stream.wait(hooks_->holds_update());
    kernels_.update(stream, format, piece, gradient, range, factors);
  }

 private:
  kernels::DeviceKernels& kernels_;
  const std::shared_ptr<const DeviceHooks> hooks_;
};

class AroundDevice final : public kernels::Device {
 public:
  AroundDevice(std::unique_ptr<kernels::Device> device, DeviceHooks hooks)
      : device_(std::move(device)), hooks_(std::make_shared<DeviceHooks>(std::move(hooks))) {
    if (device_->kernels() != nullptr) kernels_.emplace(*device_->kernels(), hooks_);
  }

  std::string_view name() const override { return device_->name(); }
  bool shares_host_memory() const override { return device_->shares_host_memory(); }
  kernels::DeviceMemory allocate(int64_t bytes) override { return device_->allocate(bytes); }
  kernels::DeviceMemory allocate_nan(int64_t bytes) override { return device_->allocate_nan(bytes); }
  std::unique_ptr<kernels::Stream> make_stream() override { return around(device_->make_stream(), false); }
  std::unique_ptr<kernels::Stream> adopt_stream(void* native) override {
    return around(device_->adopt_stream(native), true);
  }
  kernels::HostPin pin_host(void* data, int64_t bytes) override {
    return pins_->keep(device_->pin_host(data, bytes));
  }
  std::optional<int> nearest_numa_node() override { return device_->nearest_numa_node(); }
  void make_current() override { device_->make_current(); }
  void time_events(bool on) override { device_->time_events(on); }
  void poison(void* device, int64_t bytes) override { device_->poison(device, bytes); }
  kernels::DeviceKernels* kernels() override { return kernels_ ? &*kernels_ : nullptr; }

 private:
  class Watched final : public kernels::Event::State {
   public:
    Watched(kernels::Event event, std::shared_ptr<DeviceHooks> hooks)
        : event_(std::move(event)), hooks_(std::move(hooks)) {}
    bool done() override {
      const bool done = event_.done();
      if (!done && hooks_->after_look && hooks_->after_look()) event_.wait();
      return done;
    }
    void wait() override {
      if (hooks_->before_wait) hooks_->before_wait(event_.done());
      event_.wait();
    }
    std::optional<int64_t> reached_ns() override { return event_.reached_ns(); }
    const kernels::Event& event() const { return event_; }

   private:
    const kernels::Event event_;
    const std::shared_ptr<DeviceHooks> hooks_;
  };

  class AroundStream final : public kernels::Stream {
   public:
    AroundStream(std::unique_ptr<kernels::Stream> stream, bool adopted, std::shared_ptr<DeviceHooks> hooks,
                 std::shared_ptr<const HostPins> pins)
        : stream_(std::move(stream)), adopted_(adopted), hooks_(std::move(hooks)), pins_(std::move(pins)) {}
    void copy_from_host(void* device, const void* host, int64_t bytes) override {
      begin_copy(host, bytes);
      stream_->copy_from_host(device, host, bytes);
    }
    void copy_to_host(void* host, const void* device, int64_t bytes) override {
      begin_copy(host, bytes);
      stream_->copy_to_host(host, device, bytes);
    }
    kernels::Event record() override {
      if (hooks_->before_record) hooks_->before_record();
      before_call();
      return kernels::Event(std::make_shared<Watched>(stream_->record(), hooks_));
    }
    void wait(const kernels::Event& event) override {
      before_call();
      const auto* const watched = dynamic_cast<const Watched*>(event.state());
      stream_->wait(watched != nullptr ? watched->event() : event);  // the stream's wait is no thread's
    }
    void* native() override { return stream_->native(); }

   private:
    void before_call() {
      if (adopted_ && hooks_->before_adopted) hooks_->before_adopted();
    }
    void begin_copy(const void* host, int64_t bytes) {
      if (hooks_->before_copy) hooks_->before_copy(bytes);
      if (hooks_->holds_copy) stream_->wait(hooks_->holds_copy());
      if (hooks_->before_wait && !pins_->pinned(host, bytes)) hooks_->before_wait(false);
    }

    const std::unique_ptr<kernels::Stream> stream_;
    const bool adopted_;
    const std::shared_ptr<DeviceHooks> hooks_;
    const std::shared_ptr<const HostPins> pins_;
  };

  std::unique_ptr<kernels::Stream> around(std::unique_ptr<kernels::Stream> stream, bool adopted) {
    return std::make_unique<AroundStream>(std::move(stream), adopted, hooks_, pins_);
  }

  const std::unique_ptr<kernels::Device> device_;
  const std::shared_ptr<HostPins> pins_ = std::make_shared<HostPins>();
  const std::shared_ptr<DeviceHooks> hooks_;  // of events too, which may outlive this
  std::optional<AroundKernels> kernels_;
};

}  // namespace overspill::testing
