// Where forward and backward run: host (the CPU itself), CUDA (cuda/), or the simulated accelerator of the
// tests.
//
// The engine reaches device memory only through this interface. A pointer of `DeviceMemory` may be
// dereferenced by the host only where `shares_host_memory()` is true.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace overspill::kernels {

/// Work that a device could not do: a copy outside its memory, a negative size, a fault found late. what()
/// names addresses and sizes.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A point in a stream's work. A cheap value, copied freely; default-constructed: already reached.
class Event {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual bool done() = 0;
    virtual void wait() = 0;  // blocks the calling host thread; throws what the stream's work threw
    /// When it was reached, in ns of the steady clock, where that is known (Device::time_events). It is done.
    virtual std::optional<int64_t> reached_ns() { return std::nullopt; }
  };
  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool done() const { return state_ == nullptr || state_->done(); }
  void wait() const {
    if (state_ != nullptr) state_->wait();
  }
  std::optional<int64_t> reached_ns() const {
    return state_ == nullptr ? std::nullopt : state_->reached_ns();
  }
  State* state() const { return state_.get(); }

 private:
  std::shared_ptr<State> state_;
};

/// A queue of work that the device does in order. May be used from one thread at a time.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Asynchronous. `host` must stay valid and unchanged (from_host) or unread (to_host) until an event
  /// recorded later is done.
  virtual void copy_from_host(void* device, const void* host, int64_t bytes) = 0;
  virtual void copy_to_host(void* host, const void* device, int64_t bytes) = 0;
  /// Everything submitted to this stream so far.
  virtual Event record() = 0;
  /// Later work of this stream starts after the event (of any stream of the device).
  virtual void wait(const Event& event) = 0;
  /// The backend's own queue (a cudaStream_t), for libraries that put work on it; null where there is none.
  virtual void* native() = 0;
};

/// A run of bytes that a device gave: owned, move-only, handed back by the destructor.
template <class What>
class DeviceRange {
 public:
  using Release = void (*)(void* context, void* data, int64_t bytes) noexcept;
  DeviceRange() = default;
  DeviceRange(void* data, int64_t bytes, Release release, void* context)
      : data_(data), bytes_(bytes), release_(release), context_(context) {}
  DeviceRange(DeviceRange&& other) noexcept { swap(other); }
  DeviceRange& operator=(DeviceRange&& other) noexcept {
    DeviceRange taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~DeviceRange() {
    if (data_ != nullptr) release_(context_, data_, bytes_);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  void swap(DeviceRange& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
    std::swap(context_, other.context_);
  }
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Release release_ = nullptr;
  void* context_ = nullptr;
};

/// Device memory. Freed by the destructor: the owner has waited for every event of its last uses.
using DeviceMemory = DeviceRange<struct InDeviceMemory>;

/// Host memory that the device copies from and to by itself while this lives; empty where a device has no use
/// for that. The memory outlives it, and the owner has waited as for device memory.
using HostPin = DeviceRange<struct InHostMemory>;

class DeviceKernels;  // device_kernels.h

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string_view name() const = 0;
  /// True: device memory is host memory, a parameter resident on the host is used in place, and work is done
  /// when it is submitted to a stream.
  virtual bool shares_host_memory() const = 0;
  /// Aligned to 4096 bytes. Throws std::bad_alloc with nothing changed. The device outlives it.
  virtual DeviceMemory allocate(int64_t bytes) = 0;
  /// Reads as 0xFF in full length (NaN in every float format), for as little memory as the device can: what
  /// is written to it is lost, and may show at its other addresses. Otherwise as allocate().
  virtual DeviceMemory allocate_nan(int64_t bytes) = 0;
  virtual std::unique_ptr<Stream> make_stream() = 0;
  /// A stream over a queue that somebody else owns, such as a framework: `native` is what native() of a
  /// stream of this device is. The queue outlives it, and whoever owns the queue may go on using it.
  virtual std::unique_ptr<Stream> adopt_stream(void* native) = 0;
  /// Copies between pinned host memory and the device are asynchronous and as fast as the link; from other
  /// memory they may be neither. `data` is aligned to 4096 bytes. Throws DeviceError. The device outlives it.
  virtual HostPin pin_host(void* data, int64_t bytes) = 0;
  /// The NUMA node of host memory next to it, by the system's number; nothing where that is not known.
  virtual std::optional<int> nearest_numa_node() { return std::nullopt; }
  /// What libraries do in the calling thread is on this device from now on.
  virtual void make_current() = 0;
  /// Events recorded from now on know when they were reached. They may cost more. No-op where it is not
  /// known.
  virtual void time_events(bool on) = 0;
  /// Fills freed or released memory so that stale use is loud (0xFF: NaN in every float format). No-op where
  /// that costs too much.
  virtual void poison(void* device, int64_t bytes) = 0;
  /// What it computes by itself, as long as it lives; null: nothing, and no unit stays on it.
  virtual DeviceKernels* kernels() { return nullptr; }
};

}  // namespace overspill::kernels
