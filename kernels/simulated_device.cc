#include "kernels/simulated_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels/device_kernels.h"
#include "kernels/math.h"

namespace overspill::kernels {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr std::byte kPoison{0xFF};

struct FreePages {
  void operator()(std::byte* data) const noexcept { ::operator delete (data, std::align_val_t{kPageBytes}); }
};
using Pages = std::unique_ptr<std::byte, FreePages>;

/// One allocation. `mapped_bytes` rounds `bytes` up to pages; what lies between must stay poison (a write
/// past the end).
struct Block {
  Pages pages;
  int64_t bytes = 0;
  int64_t mapped_bytes = 0;
  int copies = 0;  // running now

  bool poisoned_from(int64_t begin) const {
    const std::byte* data = pages.get();
    return std::all_of(data + begin, data + mapped_bytes, [](std::byte b) { return b == kPoison; });
  }
};

/// The device's address space: which addresses are live, and what was freed lately. Thread-safe.
class AddressSpace {
 public:
  explicit AddressSpace(const SimulatedDeviceOptions& options) : options_(options) {}
  ~AddressSpace();

  std::byte* allocate(int64_t bytes);
  void free(std::byte* data) noexcept;
  /// Runs `use` while [data, data + bytes) is held against free(); throws DeviceError unless it lies in one
  /// live block.
  void with(const void* data, int64_t bytes, const char* what, const std::function<void()>& use);
  void verify();
  int64_t used_bytes() const {
    const std::lock_guard lock(mutex_);
    return used_bytes_;
  }

 private:
  Block& find(const std::byte* data, int64_t bytes, const char* what);
  void look_for_writes(const Block& block);
  void throw_violation();

  const SimulatedDeviceOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable copies_done_;
  std::map<const std::byte*, Block> live_;
  std::deque<Block> quarantine_;
  std::deque<std::string> violations_;  // found, not yet thrown
  int64_t used_bytes_ = 0;
  int64_t quarantined_bytes_ = 0;
};

AddressSpace::~AddressSpace() {
  for (const Block& block : quarantine_) look_for_writes(block);
  if (violations_.empty()) return;
  for (const std::string& violation : violations_) fmt::print(stderr, "{}\n", violation);
  std::abort();
}

std::byte* AddressSpace::allocate(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  throw_violation();
  if (bytes > options_.memory_bytes - used_bytes_) throw std::bad_alloc();
  const int64_t mapped_bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  Pages pages(static_cast<std::byte*>(
      ::operator new (static_cast<size_t>(mapped_bytes), std::align_val_t{kPageBytes})));
  std::byte* data = pages.get();
  std::fill_n(data, mapped_bytes, kPoison);
  live_.emplace(data, Block{std::move(pages), bytes, mapped_bytes, 0});
  used_bytes_ += bytes;
  return data;
}

void AddressSpace::free(std::byte* data) noexcept {
  std::unique_lock lock(mutex_);
  auto node = live_.extract(data);  // from here on, no new copy finds it
  Block& block = node.mapped();
  if (block.copies > 0) {
    violations_.push_back(
        fmt::format("simulated device: {} bytes at {} were freed while a copy used them; wait "
                    "for the event of the last use first",
                    block.bytes, fmt::ptr(data)));
    copies_done_.wait(lock, [&] { return block.copies == 0; });
  }
  if (!block.poisoned_from(block.bytes)) {
    violations_.push_back(
        fmt::format("simulated device: a write past the end of {} bytes at {}", block.bytes, fmt::ptr(data)));
  }
  std::fill_n(data, block.mapped_bytes, kPoison);
  used_bytes_ -= block.bytes;
  quarantined_bytes_ += block.mapped_bytes;
  quarantine_.push_back(std::move(block));
  while (quarantined_bytes_ > options_.quarantine_bytes) {
    look_for_writes(quarantine_.front());
    quarantined_bytes_ -= quarantine_.front().mapped_bytes;
    quarantine_.pop_front();
  }
}

void AddressSpace::with(const void* data, int64_t bytes, const char* what, const std::function<void()>& use) {
  std::unique_lock lock(mutex_);
  Block& block = find(static_cast<const std::byte*>(data), bytes, what);
  ++block.copies;
  // Without the lock: it would order unrelated copies, and hide their races from ThreadSanitizer.
  lock.unlock();
  use();
  lock.lock();
  if (--block.copies == 0) copies_done_.notify_all();
}

void AddressSpace::verify() {
  const std::lock_guard lock(mutex_);
  for (; !quarantine_.empty(); quarantine_.pop_front()) look_for_writes(quarantine_.front());
  quarantined_bytes_ = 0;
  throw_violation();
}

Block& AddressSpace::find(const std::byte* data, int64_t bytes, const char* what) {
  auto after = live_.upper_bound(data);
  if (after != live_.begin()) {
    auto& [begin, block] = *std::prev(after);
    const int64_t offset = data - begin;
    if (offset <= block.bytes && bytes <= block.bytes - offset) return block;
  }
  throw DeviceError(fmt::format(
      "simulated device: {} of {} bytes at {} lies outside every live allocation (freed too early, or a "
      "host address)",
      what, bytes, fmt::ptr(data)));
}

void AddressSpace::look_for_writes(const Block& block) {
  if (block.poisoned_from(0)) return;
  violations_.push_back(fmt::format("simulated device: {} bytes at {} were written after they were freed",
                                    block.bytes, fmt::ptr(block.pages.get())));
}

void AddressSpace::throw_violation() {
  if (violations_.empty()) return;
  const std::string violation = std::move(violations_.front());
  violations_.pop_front();
  throw DeviceError(violation);
}

/// Host memory that is pinned now. Thread-safe.
class Pins {
 public:
  void add(const void* data, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    ends_[static_cast<const std::byte*>(data)] = static_cast<const std::byte*>(data) + bytes;
  }
  void remove(const void* data) {
    const std::lock_guard lock(mutex_);
    ends_.erase(static_cast<const std::byte*>(data));
  }
  void count_copy(const void* host, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto* begin = static_cast<const std::byte*>(host);
    const auto after = ends_.upper_bound(begin);
    if (after == ends_.begin() || begin + bytes > std::prev(after)->second) ++unpinned_copies_;
  }
  int64_t unpinned_copies() const {
    const std::lock_guard lock(mutex_);
    return unpinned_copies_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, const std::byte*> ends_;  // by begin
  int64_t unpinned_copies_ = 0;
};

/// A point in a stream: reached when the stream's thread gets there, with what went wrong before it.
class Reached final : public Event::State {
 public:
  bool done() override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  std::optional<int64_t> reached_ns() override {
    const std::lock_guard lock(mutex_);
    return reached_ns_;
  }
  void reach(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    done_ = true;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    reached_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::optional<int64_t> reached_ns_;
  std::exception_ptr error_;
};

class SimulatedStream final : public Stream, public SimulatedQueue {
 public:
  SimulatedStream(AddressSpace& memory, Pins& pins, const SimulatedDeviceOptions& options, uint64_t seed)
      : memory_(memory),
        pins_(pins),
        random_(seed),
        delay_us_(options.delay_min.count(), options.delay_max.count()),
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
    pins_.count_copy(host, bytes);
    submit([=, this] {
      do_unless_failed([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us_(random_)));
        memory_.with(device, bytes, what, transfer);
      });
    });
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
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    submitted_.notify_one();
  }

  void run() {
    while (true) {
      std::unique_lock lock(mutex_);
      submitted_.wait(lock, [&] { return !tasks_.empty(); });
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
  std::exception_ptr error_;                         // of the stream's thread
  std::mutex mutex_;
  std::condition_variable submitted_;
  std::deque<Task> tasks_;
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

/// Kernels that run on a stream's thread, element by element as a GPU's threads would.
class SimulatedKernels final : public DeviceKernels {
 public:
  SimulatedKernels(AddressSpace& memory, const SimulatedDeviceOptions& options)
      : memory_(memory), delay_(options.delay_max) {}

  void clear(Stream& stream, void* to, int64_t bytes) override {
    run(stream, "clear", {{to, bytes}}, [=] { std::memset(to, 0, static_cast<size_t>(bytes)); });
  }

  void take_in(Stream& stream, Float from_type, const void* from, Float to_type, void* to, int64_t count,
               bool first) override {
    if (from_type == Float::fp32 && to_type == Float::bf16)
      throw DeviceError("take_in: an fp32 gradient does not go into a bf16 one");
    run(stream, "take_in", {{from, count * width(from_type)}, {to, count * width(to_type)}}, [=] {
      with_type(from_type, from, [&]<class From>(const From* source) {
        if (to_type == Float::fp32) {
          for (int64_t i = 0; i < count; ++i) kernels::take_in(source[i], first, static_cast<float*>(to)[i]);
        } else if constexpr (std::is_same_v<From, uint16_t>) {
          for (int64_t i = 0; i < count; ++i)
            kernels::take_in(source[i], first, static_cast<uint16_t*>(to)[i]);
        }
      });
    });
  }

  void squares(Stream& stream, Float type, const void* from, int64_t count, Squares* blocks) override {
    const int64_t n = squares_blocks(count);
    const auto size = static_cast<int64_t>(sizeof(Squares));
    run(stream, "squares", {{from, count * width(type)}, {blocks, n * size}}, [=] {
      with_type(type, from, [&](const auto* source) {
        for (int64_t b = 0; b < n; ++b)
          blocks[b] = squares_of_block(source + b * kSquaresBlock,
                                       std::min(kSquaresBlock, count - b * kSquaresBlock));
      });
    });
  }

  void update_adam(Stream& stream, const AdamArrays& arrays, Float gradient_type, const void* gradient,
                   int64_t count, const AdamFactors& factors) override {
    std::vector<Range> ranges = {{gradient, count * width(gradient_type)},
                                 {arrays.weight, count * (arrays.lo != nullptr ? 2 : 4)},
                                 {arrays.m, count * 4},
                                 {arrays.v, count * 4}};
    if (arrays.lo != nullptr) ranges.push_back({arrays.lo, count * 2});
    run(stream, "update_adam", std::move(ranges), [=] {
      with_type(gradient_type, gradient, [&](const auto* g) {
        for (int64_t i = 0; i < count; ++i) {
          if (arrays.lo != nullptr) {
            kernels::update_adam(factors, widen(g[i]), static_cast<uint16_t*>(arrays.weight)[i], arrays.lo[i],
                                 arrays.m[i], arrays.v[i]);
          } else {
            kernels::update_adam(factors, widen(g[i]), static_cast<float*>(arrays.weight)[i], arrays.m[i],
                                 arrays.v[i]);
          }
        }
      });
    });
  }

 private:
  struct Range {
    const void* data;
    int64_t bytes;
  };

  static int64_t width(Float type) { return type == Float::bf16 ? 2 : 4; }

  template <class Use>
  static void with_type(Float type, const void* data, Use use) {
    if (type == Float::bf16) return use(static_cast<const uint16_t*>(data));
    use(static_cast<const float*>(data));
  }

  template <class T>
  static Squares squares_of_block(const T* from, int64_t count) {
    std::array<SquaresLane, 32> lanes;
    for (int64_t i = 0; i < count; ++i) lanes[static_cast<size_t>(i % 32)].add(widen(from[i]));
    for (size_t w = 16; w > 0; w /= 2) {
      for (size_t lane = 0; lane < w; ++lane) lanes[lane].sum += lanes[lane + w].sum;
    }
    const bool finite = std::all_of(lanes.begin(), lanes.end(), [](const auto& l) { return l.finite; });
    return {lanes[0].sum, finite ? 0 : 1};
  }

  /// On the stream's thread, late, with all memory that it touches held.
  void run(Stream& stream, const char* name, std::vector<Range> ranges, std::function<void()> work) {
    if (stream.native() == nullptr)
      throw DeviceError(fmt::format("{}: not a stream of a simulated device", name));
    static_cast<SimulatedQueue*>(stream.native())
        ->enqueue([this, name, ranges = std::move(ranges), work = std::move(work)] {
          std::this_thread::sleep_for(delay_ / 2);
          hold(name, ranges, 0, work);
        });
  }
  void hold(const char* name, const std::vector<Range>& ranges, size_t next,
            const std::function<void()>& work) {
    while (next < ranges.size() && ranges[next].bytes == 0) ++next;
    if (next == ranges.size()) return work();
    memory_.with(ranges[next].data, ranges[next].bytes, name, [&] { hold(name, ranges, next + 1, work); });
  }

  AddressSpace& memory_;
  const std::chrono::microseconds delay_;
};

class SimulatedDeviceImpl final : public SimulatedDevice {
 public:
  explicit SimulatedDeviceImpl(const SimulatedDeviceOptions& options)
      : options_(options), memory_(options), kernels_(memory_, options) {
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

  DeviceKernels* kernels() override { return &kernels_; }

  void verify_freed_memory() override { memory_.verify(); }
  int64_t used_bytes() const override { return memory_.used_bytes(); }
  int64_t unpinned_copies() const override { return pins_.unpinned_copies(); }

 private:
  const SimulatedDeviceOptions options_;
  AddressSpace memory_;
  SimulatedKernels kernels_;
  Pins pins_;
  std::atomic<uint64_t> streams_ = 0;
};

}  // namespace

std::unique_ptr<SimulatedDevice> make_simulated_device(const SimulatedDeviceOptions& options) {
  return std::make_unique<SimulatedDeviceImpl>(options);
}

}  // namespace overspill::kernels
