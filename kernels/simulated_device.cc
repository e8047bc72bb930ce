#include "kernels/simulated_device.h"

#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <new>
#include <random>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "kernels/clock.h"
#include "kernels/simulated/address_space.h"
#include "kernels/simulated/simulated_kernels.h"

namespace overspill::kernels {
namespace {

/// Host memory that is pinned now. Thread-safe.
class Pins {
 public:
  void add(const void* data, int64_t bytes) {
    const MutexLock lock(mutex_);
    ends_[static_cast<const std::byte*>(data)] = static_cast<const std::byte*>(data) + bytes;
  }
  void remove(const void* data) {
    const MutexLock lock(mutex_);
    ends_.erase(static_cast<const std::byte*>(data));
  }
  void count_copy(const void* host, int64_t bytes) {
    const MutexLock lock(mutex_);
    const auto* begin = static_cast<const std::byte*>(host);
    const auto after = ends_.upper_bound(begin);
    if (after == ends_.begin() || begin + bytes > std::prev(after)->second) ++unpinned_copies_;
  }
  int64_t unpinned_copies() const {
    const MutexLock lock(mutex_);
    return unpinned_copies_;
  }

 private:
  mutable Mutex mutex_;
  std::map<const std::byte*, const std::byte*> ends_ GUARDED_BY(mutex_);  // by begin
  int64_t unpinned_copies_ GUARDED_BY(mutex_) = 0;
};

/// A point in a stream: reached when the stream's thread gets there, with what went wrong before it.
class Reached final : public Event::State {
 public:
  bool done() override {
    const MutexLock lock(mutex_);
    return done_;
  }
  void wait() override {
    const MutexLock lock(mutex_);
    while (!done_) changed_.wait(mutex_);
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  std::optional<int64_t> reached_ns() override {
    const MutexLock lock(mutex_);
    return reached_ns_;
  }
  void reach(std::exception_ptr error) {
    const MutexLock lock(mutex_);
    done_ = true;
    reached_ns_ = steady_now_ns();
    error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  Mutex mutex_;
  Condition changed_;
  bool done_ GUARDED_BY(mutex_) = false;
  std::optional<int64_t> reached_ns_ GUARDED_BY(mutex_);
  std::exception_ptr error_ GUARDED_BY(mutex_);
};

class SimulatedStream final : public Stream, public SimulatedQueue {
 public:
  SimulatedStream(AddressSpace& memory, Pins& pins, const SimulatedDeviceOptions& options, uint64_t seed)
      : memory_(memory),
        pins_(pins),
        random_(seed),
        delay_us_(options.delay_min.count(), options.delay_max.count()),
        link_bytes_per_s_(options.link_bytes_per_s),
        thread_([this] { run(); }) {}

  ~SimulatedStream() override {
    submit(nullptr);
    thread_.join();
  }

  void copy_from_host(void* device, const void* host, int64_t bytes) override {
    copy(device, host, bytes, "a copy from the host",
         [=] { std::memcpy(device, host, static_cast<size_t>(bytes)); });
  }
  void copy_to_host(void* host, const void* device, int64_t bytes) override {
    copy(device, host, bytes, "a copy to the host",
         [=] { std::memcpy(host, device, static_cast<size_t>(bytes)); });
  }

  Event record() override {
    auto reached = std::make_shared<Reached>();
    submit([this, reached] { reached->reach(error_); });
    return Event(reached);
  }

  void wait(const Event& event) override {
    submit([this, event] { do_unless_failed([&] { event.wait(); }); });
  }

  void* native() override { return static_cast<SimulatedQueue*>(this); }
  void enqueue(std::function<void()> work) override {
    submit([this, work = std::move(work)] { do_unless_failed(work); });
  }

 private:
  using Task = std::function<void()>;

  void copy(const void* device, const void* host, int64_t bytes, const char* what, Task transfer) {
    if (bytes < 0) throw DeviceError(fmt::format("simulated device: {} of {} bytes", what, bytes));
    if (bytes == 0) return;
    if (memory_.holds(host)) {
      throw DeviceError(
          fmt::format("simulated device: {}: {} is an address of the device", what, fmt::ptr(host)));
    }
    pins_.count_copy(host, bytes);
    submit([=, this] {
      do_unless_failed([&] {
        const auto begin = std::chrono::steady_clock::now();
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us_(random_)));
        memory_.with(device, bytes, what, transfer);
        std::this_thread::sleep_until(begin + time_on_link(bytes));
      });
    });
  }

  std::chrono::nanoseconds time_on_link(int64_t bytes) const {
    if (link_bytes_per_s_ == 0) return {};
    return std::chrono::nanoseconds(
        static_cast<int64_t>(static_cast<double>(bytes) / static_cast<double>(link_bytes_per_s_) * 1e9));
  }

  /// As on a real device, the first error ends a stream: what comes after it is not done, and every later
  /// event tells why.
  void do_unless_failed(const Task& task) {
    if (error_ != nullptr) return;
    try {
      task();
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  void submit(Task task) {
    const MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
    submitted_.notify_one();
  }

  void run() {
    while (true) {
      MutexLock lock(mutex_);
      while (tasks_.empty()) submitted_.wait(mutex_);
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (task == nullptr) return;
      task();
    }
  }

  AddressSpace& memory_;
  Pins& pins_;
  std::mt19937_64 random_;                           // of the stream's thread
  std::uniform_int_distribution<int64_t> delay_us_;  // of the stream's thread
  const int64_t link_bytes_per_s_;
  std::exception_ptr error_;  // of the stream's thread
  Mutex mutex_;
  Condition submitted_;
  std::deque<Task> tasks_ GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when all else is there
};

/// Work for a stream that somebody else owns.
class AdoptedStream final : public Stream {
 public:
  explicit AdoptedStream(SimulatedStream& owned) : owned_(owned) {}
  void copy_from_host(void* device, const void* host, int64_t bytes) override {
    owned_.copy_from_host(device, host, bytes);
  }
  void copy_to_host(void* host, const void* device, int64_t bytes) override {
    owned_.copy_to_host(host, device, bytes);
  }
  Event record() override { return owned_.record(); }
  void wait(const Event& event) override { owned_.wait(event); }
  void* native() override { return owned_.native(); }

 private:
  SimulatedStream& owned_;
};

class SimulatedDeviceImpl final : public SimulatedDevice {
 public:
  explicit SimulatedDeviceImpl(const SimulatedDeviceOptions& options)
      : options_(options), memory_(options), kernels_(make_simulated_kernels(memory_, options.delay_max)) {
    if (options.delay_min.count() < 0 || options.delay_max < options.delay_min) {
      throw DeviceError(
          fmt::format("simulated device: delays from {} to {} us; give 0 <= delay_min <= delay_max",
                      options.delay_min.count(), options.delay_max.count()));
    }
  }

  std::string_view name() const override { return "simulated"; }
  bool shares_host_memory() const override { return false; }

  DeviceMemory allocate(int64_t bytes) override {
    if (bytes < 0) throw DeviceError(fmt::format("simulated device: an allocation of {} bytes", bytes));
    if (bytes == 0) return DeviceMemory();
    const auto free = [](void* context, void* data, int64_t) noexcept {
      static_cast<AddressSpace*>(context)->free(static_cast<std::byte*>(data));
    };
    return DeviceMemory(memory_.allocate(bytes), bytes, free, &memory_);
  }

  DeviceMemory allocate_nan(int64_t bytes) override { return allocate(bytes); }  // all that is new is

  std::unique_ptr<Stream> adopt_stream(void* native) override {
    auto* const queue = static_cast<SimulatedQueue*>(native);
    auto* const stream = dynamic_cast<SimulatedStream*>(queue);
    if (stream == nullptr)
      throw DeviceError("simulated device: a stream of another device was to be adopted");
    return std::make_unique<AdoptedStream>(*stream);
  }

  std::unique_ptr<Stream> make_stream() override {
    // Seeds of the same device differ, and are the same in the next run.
    const uint64_t stream = streams_.fetch_add(1, std::memory_order_relaxed);
    return std::make_unique<SimulatedStream>(memory_, pins_, options_, options_.seed * 1'000'003 + stream);
  }

  HostPin pin_host(void* data, int64_t bytes) override {
    if (bytes < 0) throw DeviceError(fmt::format("simulated device: pinning {} bytes", bytes));
    if (bytes == 0) return HostPin();
    pins_.add(data, bytes);
    const auto release = [](void* context, void* pinned, int64_t) noexcept {
      static_cast<Pins*>(context)->remove(pinned);
    };
    return HostPin(data, bytes, release, &pins_);
  }

  std::optional<int> nearest_numa_node() override { return options_.numa_node; }

  void make_current() override {}
  void time_events(bool) override {}  // they always do

  void poison(void* device, int64_t bytes) override {
    if (!options_.poison || bytes <= 0) return;
    memory_.with(device, bytes, "a poisoning",
                 [=] { std::memset(device, 0xFF, static_cast<size_t>(bytes)); });
  }

  DeviceKernels* kernels() override { return kernels_.get(); }

  void verify_freed_memory() override { memory_.verify(); }
  int64_t used_bytes() const override { return memory_.used_bytes(); }
  int64_t unpinned_copies() const override { return pins_.unpinned_copies(); }

 private:
  const SimulatedDeviceOptions options_;
  AddressSpace memory_;
  const std::unique_ptr<DeviceKernels> kernels_;
  Pins pins_;
  std::atomic<uint64_t> streams_ = 0;
};

}  // namespace

std::unique_ptr<SimulatedDevice> make_simulated_device(const SimulatedDeviceOptions& options) {
  return std::make_unique<SimulatedDeviceImpl>(options);
}

}  // namespace overspill::kernels
