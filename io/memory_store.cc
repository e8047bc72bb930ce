#include "io/memory_store.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "io/slab_export.h"
#include "io/store_base.h"

namespace overspill::io {
namespace {

constexpr int kDepth = 64;
constexpr std::byte kLost{0xDE};  // what unsynced bytes read as after a cut

/// Anonymous memory that takes up room only where it was written.
class Arena {
 public:
  explicit Arena(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* memory =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw system_error(Operation::reserve, "memory");
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Arena() { ::munmap(memory_, bytes_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* at(int64_t offset) { return memory_ + offset; }
  std::span<std::byte> of(const Extent& extent) {
    return {at(extent.offset), static_cast<size_t>(extent.bytes)};
  }

 private:
  std::byte* memory_ = nullptr;
  size_t bytes_;
};

/// Seeded chance. Guarded by a mutex: completions come from one thread, exports from others.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  bool happens(double probability) {
    if (probability <= 0) return false;
    const std::lock_guard lock(mutex_);
    return std::uniform_real_distribution<double>(0, 1)(engine_) < probability;
  }
  int64_t below(int64_t end) {
    const std::lock_guard lock(mutex_);
    return std::uniform_int_distribution<int64_t>(0, end - 1)(engine_);
  }

 private:
  std::mutex mutex_;
  std::mt19937_64 engine_;
};

class SimulatedStore final : public StoreBase<MemoryStore> {
 public:
  SimulatedStore(int64_t capacity_bytes, const Faults& faults, int64_t piece_bytes);
  ~SimulatedStore() override;

  void reserve(int64_t bytes) override;
  Extent allocate(int64_t bytes) override;
  std::vector<ExportedExtent> export_extents(std::span<const Extent> extents,
                                             const std::filesystem::path& folder) override;
  void register_memory(std::span<std::byte>) override {}
  void unregister_memory(std::span<std::byte>) override {}
  StoreStats stats() const override;

  FaultCounts fault_counts() const override;
  uint64_t seed() const override { return faults_.seed; }
  void cut() override;
  void flip_bit(const Extent& extent, int64_t bit) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct InTransit {
    Piece piece;
    Clock::time_point due;
  };

  void enqueue(Transfer& transfer) override { queue_.push(transfer); }
  Target locate(const Transfer& transfer) override;
  std::string path_of(const Target&) override { return "memory"; }
  void completed(Transfer& transfer) noexcept override;

  void deliver();
  void take_up();
  Clock::time_point due_time();
  size_t choose();
  int64_t carry_out(const Piece& piece);
  void count(int64_t FaultCounts::*counter);

  const int64_t capacity_bytes_;
  const Faults faults_;
  Arena arena_;
  Dice dice_;
  mutable std::mutex mutex_;
  FaultCounts counts_;
  std::vector<Extent> unsynced_;
  PieceQueue queue_;
  std::vector<InTransit> in_transit_;  // the delivery thread's
  std::thread thread_;
};

SimulatedStore::SimulatedStore(int64_t capacity_bytes, const Faults& faults, int64_t piece_bytes)
    : capacity_bytes_(checked_extent_bytes(capacity_bytes)),
      faults_(faults),
      arena_(capacity_bytes_),
      dice_(faults.seed),
      queue_(*this, kDepth, piece_bytes, nullptr) {
  space_.add_slab(0, capacity_bytes_);
  in_transit_.reserve(kDepth);
  thread_ = std::thread([this] { deliver(); });
}

SimulatedStore::~SimulatedStore() {
  queue_.stop();
  thread_.join();
}

void SimulatedStore::reserve(int64_t bytes) {
  if (bytes == 0) return;
  bytes = checked_extent_bytes(bytes);
  if (bytes > capacity_bytes_) {
    throw StoreError(
        {.kind = ErrorKind::no_space,
         .operation = Operation::reserve,
         .path = "memory",
         .detail = fmt::format("wanted {} bytes, {} bytes are available", bytes, capacity_bytes_)});
  }
  space_.raise_limit(bytes);
}

Extent SimulatedStore::allocate(int64_t bytes) {
  bytes = checked_extent_bytes(bytes);
  const Extent extent = space_.allocate(bytes);
  if (extent.empty()) throw no_room(space_, bytes, "memory");
  return extent;
}

Target SimulatedStore::locate(const Transfer& transfer) {
  return {.fd = -1, .slab = 0, .sums = space_.sums(transfer.extent)};
}

void SimulatedStore::completed(Transfer& transfer) noexcept {
  if (transfer.kind == Transfer::Kind::write && !transfer.error) {
    const std::lock_guard lock(mutex_);
    unsynced_.push_back(transfer.extent);
  }
  StoreBase::completed(transfer);
}

void SimulatedStore::deliver() {
  while (!in_transit_.empty() || queue_.wait()) {
    take_up();
    if (in_transit_.empty()) continue;
    const size_t chosen = choose();
    std::this_thread::sleep_until(in_transit_[chosen].due);
    Piece& piece = in_transit_[chosen].piece;
    if (queue_.settle(piece, carry_out(piece))) {
      in_transit_.erase(in_transit_.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
  }
}

void SimulatedStore::take_up() {
  Piece piece;
  while (in_transit_.size() < kDepth && queue_.next(piece)) in_transit_.push_back({piece, due_time()});
}

SimulatedStore::Clock::time_point SimulatedStore::due_time() {
  if (faults_.delay_max <= faults_.delay_min && faults_.delay_min.count() == 0) return Clock::now();
  count(&FaultCounts::delayed);
  const int64_t spread = std::max<int64_t>(0, (faults_.delay_max - faults_.delay_min).count());
  return Clock::now() + faults_.delay_min + std::chrono::microseconds(dice_.below(spread + 1));
}

size_t SimulatedStore::choose() {
  if (!faults_.reorder) return 0;
  const int64_t chosen = dice_.below(static_cast<int64_t>(in_transit_.size()));
  if (chosen != 0) count(&FaultCounts::reordered);
  return static_cast<size_t>(chosen);
}

// What the kernel would do: moves bytes, returns how many, or a negative errno.
int64_t SimulatedStore::carry_out(const Piece& piece) {
  if (dice_.happens(faults_.interrupted)) {
    count(&FaultCounts::interrupted);
    return dice_.happens(0.5) ? -EINTR : -EAGAIN;
  }
  if (dice_.happens(piece.writes() ? faults_.write_error : faults_.read_error)) {
    count(piece.writes() ? &FaultCounts::write_errors : &FaultCounts::read_errors);
    return -(piece.writes() ? faults_.write_errno : faults_.read_errno);
  }
  int64_t bytes = piece.left();
  if (bytes > kBlockBytes && dice_.happens(faults_.short_transfer)) {
    count(&FaultCounts::short_transfers);
    bytes = kBlockBytes + dice_.below(bytes - kBlockBytes);  // not always at a block boundary
  }
  std::byte* stored = arena_.at(piece.file_offset());
  if (piece.writes()) {
    std::memcpy(stored, piece.memory(), static_cast<size_t>(bytes));
    return bytes;
  }
  std::memcpy(piece.memory(), stored, static_cast<size_t>(bytes));
  if (dice_.happens(faults_.bit_flip_on_read)) {
    count(&FaultCounts::bit_flips);
    // In the first block: what lies behind the last whole block is read again after a short transfer.
    piece.memory()[dice_.below(kBlockBytes)] ^= std::byte{1} << static_cast<int>(dice_.below(8));
  }
  return bytes;
}

void SimulatedStore::count(int64_t FaultCounts::*counter) {
  const std::lock_guard lock(mutex_);
  ++(counts_.*counter);
}

FaultCounts SimulatedStore::fault_counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::vector<ExportedExtent> SimulatedStore::export_extents(std::span<const Extent> extents,
                                                           const std::filesystem::path& folder) {
  if (dice_.happens(faults_.export_error)) {
    count(&FaultCounts::export_errors);
    errno = ENOSPC;
    throw system_error(Operation::write, folder, "injected");
  }
  const HeldExtents held(space_, extents);
  int64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.bytes;
  ExtentFile file(folder, "memory", bytes);
  std::vector<ExportedExtent> results;
  for (const Extent& extent : extents) {
    const auto sums = space_.sums(extent);
    results.push_back(
        {file.path().filename().string(), file.bytes(), extent.bytes, {sums.begin(), sums.end()}});
    file.append(arena_.of(extent));
  }
  file.finish();
  sync_folder(folder);
  const std::lock_guard lock(mutex_);
  std::erase_if(unsynced_, [&](const Extent& one) {
    return std::find(extents.begin(), extents.end(), one) != extents.end();
  });
  return results;
}

void SimulatedStore::cut() {
  const std::lock_guard lock(mutex_);
  for (const Extent& extent : unsynced_) {
    if (!space_.written(extent) || !dice_.happens(faults_.dropped_at_cut)) continue;
    std::ranges::fill(arena_.of(extent), kLost);
    ++counts_.dropped;
  }
  unsynced_.clear();
}

void SimulatedStore::flip_bit(const Extent& extent, int64_t bit) {
  arena_.of(extent)[static_cast<size_t>(bit / 8)] ^= std::byte{1} << static_cast<int>(bit % 8);
}

StoreStats SimulatedStore::stats() const {
  PathStats path = queue_.meter().read();
  path.path = "memory";
  path.share = 1;
  path.reserved_bytes = space_.limit_bytes();
  StoreStats stats = base_stats({path});
  stats.retries = queue_.retries();
  stats.reserved_bytes = space_.limit_bytes();
  stats.backend = fmt::format("memory, seed {}", faults_.seed);
  return stats;
}

}  // namespace

std::unique_ptr<MemoryStore> make_memory_store(int64_t capacity_bytes, const Faults& faults,
                                               int64_t piece_bytes) {
  if (faults.has_any()) fmt::print(stderr, "memory store: seed {}\n", faults.seed);
  return std::make_unique<SimulatedStore>(capacity_bytes, faults, piece_bytes);
}

}  // namespace overspill::io
