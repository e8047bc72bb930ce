#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <limits>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "kernels/clock.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/current.h"
#include "kernels/cuda/nan_memory.h"

namespace overspill::kernels {
namespace {

constexpr int64_t kAlignBytes = 4096;
constexpr int kOldestMajor = 8;  // compute capability: the oldest that kernels are compiled for

std::string text_of(cudaError_t error) {
  return fmt::format("{} ({})", cudaGetErrorString(error), cudaGetErrorName(error));
}

std::string version_text(int version) {
  return version == 0 ? "none" : fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// A full device, with the numbers that a plain bad_alloc lacks.
class OutOfDeviceMemory final : public std::bad_alloc {
 public:
  explicit OutOfDeviceMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// What was handed to a stream last, for messages.
struct Submitted {
  const char* what = "nothing";
  const void* device = nullptr;
  const void* host = nullptr;
  int64_t bytes = 0;
};

std::string text_of(const Submitted& s) {
  return fmt::format("{} of {} bytes (device {}, host {})", s.what, s.bytes, s.device, s.host);
}

/// An event whose time on the host's clock is known: those of timed events are counted from it.
struct Base {
  Base() = default;
  Base(const Base&) = delete;
  Base& operator=(const Base&) = delete;
  ~Base() {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaEvent_t event = nullptr;
  int64_t time_ns = 0;
};

/// One that was taken from the pool. `base` null: it is not timed.
struct PooledEvent {
  cudaEvent_t event = nullptr;
  std::shared_ptr<const Base> base;
};

/// Events of one device, used again: a step records thousands.
class EventPool {
 public:
  explicit EventPool(int ordinal) : ordinal_(ordinal) {}
  ~EventPool() {
    for (const auto* idle : {&idle_, &idle_timed_}) {
      for (cudaEvent_t event : *idle) cudaEventDestroy(event);
    }
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  int ordinal() const { return ordinal_; }

  cudaError_t take(PooledEvent& taken) {
    {
      const MutexLock lock(mutex_);
      taken.base = base_;
      std::vector<cudaEvent_t>& idle = base_ != nullptr ? idle_timed_ : idle_;
      if (!idle.empty()) {
        taken.event = idle.back();
        idle.pop_back();
        return cudaSuccess;
      }
    }
    const unsigned timing = taken.base != nullptr ? 0U : cudaEventDisableTiming;
    return cudaEventCreateWithFlags(&taken.event, timing | cudaEventBlockingSync);
  }
  void give_back(const PooledEvent& taken) {
    const MutexLock lock(mutex_);
    (taken.base != nullptr ? idle_timed_ : idle_).push_back(taken.event);
  }
  /// Those taken from now on are timed, counted from `base`; null: they are not.
  void time(std::shared_ptr<const Base> base) {
    const MutexLock lock(mutex_);
    base_ = std::move(base);
  }

 private:
  const int ordinal_;
  Mutex mutex_;
  std::vector<cudaEvent_t> idle_ GUARDED_BY(mutex_);
  std::vector<cudaEvent_t> idle_timed_ GUARDED_BY(mutex_);
  std::shared_ptr<const Base> base_ GUARDED_BY(mutex_);
};

using Failure = std::shared_ptr<const std::string>;  // null: none

class CudaEvent final : public Event::State {
 public:
  /// `event` null: the device took no event any more, and `failure` says why.
  CudaEvent(std::shared_ptr<EventPool> pool, PooledEvent taken, const Submitted& last, Failure failure)
      : pool_(std::move(pool)), taken_(std::move(taken)), last_(last), failure_(std::move(failure)) {}
  ~CudaEvent() override {
    if (event() != nullptr) pool_->give_back(taken_);
  }

  bool done() override {
    if (event() == nullptr) return true;
    const Current device(pool_->ordinal());
    return cudaEventQuery(event()) != cudaErrorNotReady;
  }

  std::optional<int64_t> reached_ns() override {
    if (event() == nullptr || taken_.base == nullptr) return std::nullopt;
    const Current device(pool_->ordinal());
    float ms = 0;
    if (cudaEventElapsedTime(&ms, taken_.base->event, event()) != cudaSuccess) {
      (void)cudaGetLastError();
      return std::nullopt;
    }
    return taken_.base->time_ns + static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  }

  void wait() override {
    if (event() != nullptr) {
      const Current device(pool_->ordinal());
      if (const cudaError_t error = cudaEventSynchronize(event()); error != cudaSuccess) {
        throw DeviceError(fmt::format("cuda device {}: found late: {}; the stream's last work before it: {}",
                                      pool_->ordinal(), text_of(error), text_of(last_)));
      }
    }
    if (failure_ != nullptr) throw DeviceError(*failure_);
  }

  cudaEvent_t event() const { return taken_.event; }
  const Failure& failure() const { return failure_; }

 private:
  std::shared_ptr<EventPool> pool_;
  const PooledEvent taken_;
  const Submitted last_;
  const Failure failure_;
};

class CudaStream final : public Stream {
 public:
  explicit CudaStream(std::shared_ptr<EventPool> events) : events_(std::move(events)) {
    const Current device(ordinal());
    if (const cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
        error != cudaSuccess) {
      throw DeviceError(fmt::format("cuda device {}: a new stream: {}", ordinal(), text_of(error)));
    }
    owned_ = true;
  }
  /// Somebody else's.
  CudaStream(std::shared_ptr<EventPool> events, cudaStream_t stream)
      : events_(std::move(events)), stream_(stream) {}
  ~CudaStream() override {
    if (!owned_) return;
    const Current device(ordinal());
    cudaStreamDestroy(stream_);  // what was submitted is still done
  }

  void copy_from_host(void* device, const void* host, int64_t bytes) override {
    copy(device, host, cudaMemcpyHostToDevice, {"a copy from the host", device, host, bytes});
  }
  void copy_to_host(void* host, const void* device, int64_t bytes) override {
    copy(host, device, cudaMemcpyDeviceToHost, {"a copy to the host", device, host, bytes});
  }

  Event record() override {
    const Current device(ordinal());
    PooledEvent taken;
    cudaError_t error = events_->take(taken);
    if (error == cudaSuccess) {
      error = cudaEventRecord(taken.event, stream_);
      if (error != cudaSuccess) events_->give_back(std::exchange(taken, {}));
    }
    if (error != cudaSuccess) fail("an event after " + text_of(last_), error);
    return Event(std::make_shared<CudaEvent>(events_, std::move(taken), last_, failure_));
  }

  void wait(const Event& event) override {
    if (event.state() == nullptr) return;
    const auto* ours = dynamic_cast<const CudaEvent*>(event.state());
    if (ours == nullptr) {
      wait_for_other_device(event);
      return;
    }
    const Current device(ordinal());
    if (failure_ == nullptr) failure_ = ours->failure();
    if (ours->event() == nullptr) return;
    if (const cudaError_t error = cudaStreamWaitEvent(stream_, ours->event()); error != cudaSuccess)
      fail("a wait for an event", error);
  }

  void* native() override { return stream_; }

 private:
  int ordinal() const { return events_->ordinal(); }

  void copy(void* to, const void* from, cudaMemcpyKind kind, const Submitted& work) {
    if (work.bytes < 0)
      throw DeviceError(fmt::format("cuda device {}: {} of {} bytes", ordinal(), work.what, work.bytes));
    // The first failure ends a stream: what comes after it is not done, and every later event tells why.
    if (work.bytes == 0 || failure_ != nullptr) return;
    const Current device(ordinal());
    const auto bytes = static_cast<size_t>(work.bytes);
    if (const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, stream_); error != cudaSuccess) {
      fail(text_of(work), error);
    } else {
      last_ = work;
    }
  }

  void wait_for_other_device(const Event& event) {
    try {
      event.wait();
    } catch (const DeviceError& error) {
      if (failure_ == nullptr) failure_ = std::make_shared<const std::string>(error.what());
    }
  }

  void fail(const std::string& work, cudaError_t error) {
    (void)cudaGetLastError();  // told here, so not again by the framework's next call
    if (failure_ != nullptr) return;
    failure_ = std::make_shared<const std::string>(
        fmt::format("cuda device {}: {}: {}", ordinal(), work, text_of(error)));
  }

  const std::shared_ptr<EventPool> events_;
  cudaStream_t stream_ = nullptr;
  bool owned_ = false;
  Submitted last_;
  Failure failure_;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int ordinal)
      : ordinal_(ordinal),
        events_(std::make_shared<EventPool>(ordinal)),
        kernels_(cuda::make_kernels(ordinal)) {
    const Current device(ordinal_);
    check(cudaStreamCreateWithFlags(&poisoning_, cudaStreamNonBlocking), "a new stream");
  }
  ~CudaDevice() override {
    const Current device(ordinal_);
    cudaStreamDestroy(poisoning_);
  }

  std::string_view name() const override { return "cuda"; }
  bool shares_host_memory() const override { return false; }

  DeviceMemory allocate(int64_t bytes) override {
    if (bytes < 0)
      throw DeviceError(fmt::format("cuda device {}: an allocation of {} bytes", ordinal_, bytes));
    if (bytes == 0) return DeviceMemory();
    if (bytes > std::numeric_limits<int64_t>::max() - kAlignBytes) throw std::bad_alloc();
    const Current device(ordinal_);
    const MutexLock lock(mutex_);
    // CUDA promises 256 bytes of alignment.
    void* base = nullptr;
    const cudaError_t error = cudaMalloc(&base, static_cast<size_t>(bytes + kAlignBytes - 1));
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      size_t free_bytes = 0, all_bytes = 0;
      cudaMemGetInfo(&free_bytes, &all_bytes);
      throw OutOfDeviceMemory(fmt::format("cuda device {}: {} bytes asked for, {} of {} free", ordinal_,
                                          bytes, free_bytes, all_bytes));
    }
    check(error, "an allocation", bytes);
    const auto begin = reinterpret_cast<uintptr_t>(base);
    void* const data = static_cast<std::byte*>(base) + (-begin & (kAlignBytes - 1));
    bases_.emplace(data, base);
    const auto release = [](void* context, void* allocated, int64_t) noexcept {
      static_cast<CudaDevice*>(context)->free(allocated);
    };
    return DeviceMemory(data, bytes, release, this);
  }

  DeviceMemory allocate_nan(int64_t bytes) override {
    if (bytes > 0) {
      const Current device(ordinal_);
      if (DeviceMemory mapped = map_nan(ordinal_, bytes); mapped.data() != nullptr) return mapped;
    }
    DeviceMemory memory = allocate(bytes);
    poison(memory.data(), bytes);
    return memory;
  }

  std::unique_ptr<Stream> make_stream() override { return std::make_unique<CudaStream>(events_); }
  std::unique_ptr<Stream> adopt_stream(void* native) override {
    return std::make_unique<CudaStream>(events_, static_cast<cudaStream_t>(native));
  }

  HostPin pin_host(void* data, int64_t bytes) override {
    if (bytes < 0) throw DeviceError(fmt::format("cuda device {}: pinning {} bytes", ordinal_, bytes));
    if (bytes == 0) return HostPin();
    const Current device(ordinal_);
    const auto flags = cudaHostRegisterPortable;  // for every device of the process
    check(cudaHostRegister(data, static_cast<size_t>(bytes), flags), "pinning host memory", bytes, data);
    const auto release = [](void*, void* pinned, int64_t) noexcept { cudaHostUnregister(pinned); };
    return HostPin(data, bytes, release, nullptr);
  }

  std::optional<int> nearest_numa_node() override {
    int node = -1;           // also where the machine has no nodes
#if CUDART_VERSION >= 12020  // the attribute is that old
    if (cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, ordinal_) != cudaSuccess)
      (void)cudaGetLastError();
#endif
    return node >= 0 ? std::optional(node) : std::nullopt;
  }

  DeviceKernels* kernels() override {
    return kernels_.get();
  }

  void make_current() override {
    check(cudaSetDevice(ordinal_), "making it current");
  }

  void time_events(bool on) override {
    if (!on) return events_->time(nullptr);
    const Current current(ordinal_);
    auto base = std::make_shared<Base>();
    check(cudaEventCreate(&base->event), "a timed event");
    const MutexLock lock(mutex_);
    check(cudaEventRecord(base->event, poisoning_), "a timed event");
    check(cudaEventSynchronize(base->event), "a timed event");
    base->time_ns = steady_now_ns();
    events_->time(std::move(base));
  }

  void poison(void* device, int64_t bytes) override {
    if (bytes <= 0) return;
    const Current current(ordinal_);
    const MutexLock lock(mutex_);
    check(cudaMemsetAsync(device, 0xFF, static_cast<size_t>(bytes), poisoning_), "a poisoning", bytes,
          device);
    check(cudaStreamSynchronize(poisoning_), "a poisoning", bytes, device);
  }

 private:
  void free(void* data) noexcept {
    const Current device(ordinal_);
    const MutexLock lock(mutex_);
    cudaFree(bases_.extract(data).mapped());
  }

  void check(cudaError_t error, const char* what, int64_t bytes = 0, const void* at = nullptr) const {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    throw DeviceError(
        fmt::format("cuda device {}: {} ({} bytes at {}): {}", ordinal_, what, bytes, at, text_of(error)));
  }

  const int ordinal_;
  const std::shared_ptr<EventPool> events_;
  const std::unique_ptr<DeviceKernels> kernels_;
  Mutex mutex_;
  std::unordered_map<void*, void*> bases_ GUARDED_BY(mutex_);  // what cudaMalloc gave, by what we gave
  cudaStream_t poisoning_ = nullptr;
};

}  // namespace

std::string why_no_cuda(int ordinal) {
  int devices = 0, runtime = 0, driver = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    (void)cudaGetLastError();
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    return fmt::format("no CUDA device: {}; built with CUDA {}, the driver's is {}", text_of(error),
                       version_text(runtime), version_text(driver));
  }
  if (ordinal < 0 || ordinal >= devices)
    return fmt::format("no CUDA device {}: there are {}, counted from 0", ordinal, devices);
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (major < kOldestMajor) {
    return fmt::format("CUDA device {} has compute capability {}.{}; {}.0 is the oldest that works", ordinal,
                       major, minor, kOldestMajor);
  }
  return {};
}

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  if (const std::string why = why_no_cuda(ordinal); !why.empty()) throw DeviceError(why);
  return std::make_unique<CudaDevice>(ordinal);
}

}  // namespace overspill::kernels
