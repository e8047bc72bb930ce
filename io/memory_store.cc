#include "io/memory_store.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "io/say.h"
#include "io/slab_export.h"
#include "io/store_base.h"

namespace overspill::io {
namespace {

constexpr int kDepth = 64;
constexpr const char* kName = "memory";  // where its errors are
constexpr std::byte kLost{0xDE};         // what unsynced bytes read as after a cut
constexpr int kPassingErrorsMax = 5;     // in a row; the store tries again twice as often
constexpr RetryPolicy kRetry{.first_wait = std::chrono::microseconds(10)};

/// Anonymous memory that takes up room only where it was written.
class Arena {
 public:
  explicit Arena(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* memory =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw system_error(Operation::reserve, kName);
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

/// Seeded chance, of any thread: completions come from one, exports from others.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  bool happens(double probability) {
    if (probability <= 0) return false;
    const MutexLock lock(mutex_);
    return std::uniform_real_distribution<double>(0, 1)(engine_) < probability;
  }
  int64_t below(int64_t end) {
    const MutexLock lock(mutex_);
    return std::uniform_int_distribution<int64_t>(0, end - 1)(engine_);
  }

 private:
  Mutex mutex_;
  std::mt19937_64 engine_ GUARDED_BY(mutex_);
};

class SimulatedStore final : public StoreBase<MemoryStore> {
 public:
  SimulatedStore(int64_t capacity_bytes, const Faults& faults, int64_t piece_bytes,
                 std::shared_ptr<VirtualTime> time);
  ~SimulatedStore() override;

  void reserve(int64_t bytes) override;
  Extent allocate(int64_t bytes) override;
  void release(const Extent& extent) override;
  bool poll() override;
  Export export_extents(std::span<const Extent> extents, const std::filesystem::path& folder,
                        ExportPace& pace) override;
  using Store::export_extents;
  bool share_lives(uint64_t) const override { return false; }  // it copies
  void end_share(uint64_t) noexcept override {}
  void register_memory(std::span<std::byte>) override {}
  void unregister_memory(std::span<std::byte>) override {}
  StoreStats stats() const override;

  FaultCounts fault_counts() const override;
  uint64_t seed() const override { return faults_.seed; }
  void cut() override;
  void flip_bit(const Extent& extent, int64_t bit) override;
  int64_t complete_bytes() const override;
  int64_t take_least_complete_bytes() override;
  const std::vector<Answer>& answers() const override { return answers_; }
  std::string file_of(const Extent&) const override { return kName; }

 private:
  struct InTransit {
    Piece piece;
    int64_t due_us;
  };

  void enqueue(Transfer& transfer) override { queue_.push(transfer); }
  Target locate(const Transfer& transfer) override;
  std::string path_of(const Target&) override { return kName; }
  void first_retry(const Error&) noexcept override {}
  void completed(Transfer& transfer) noexcept override;

  void work();
  void take_up();
  int64_t now_us() const;
  int64_t delay_us();
  size_t choose();
  bool deliver(size_t chosen);
  int64_t carry_out(const Piece& piece, const char*& fault);
  bool passing(const Piece& piece);
  bool fails(const Piece& piece);
  void land(const Piece& piece, int64_t bytes, const char*& fault);
  void fetch(const Piece& piece, int64_t bytes, const char*& fault);
  int64_t elsewhere(const Piece& piece, int64_t bytes);
  bool strikes(double probability, int64_t FaultCounts::*counter);
  void count(int64_t FaultCounts::*counter);

  const int64_t capacity_bytes_;
  const Faults faults_;
  const std::shared_ptr<VirtualTime> time_;  // null: the thread delivers
  Arena arena_;
  Dice dice_;
  mutable Mutex mutex_;
  FaultCounts counts_ GUARDED_BY(mutex_);
  int64_t complete_bytes_ GUARDED_BY(mutex_) = 0;
  int64_t least_complete_bytes_ GUARDED_BY(mutex_) = 0;
  std::vector<Extent> unsynced_ GUARDED_BY(mutex_);
  PieceQueue queue_;
  // Of whoever delivers:
  std::vector<InTransit> in_transit_;
  std::vector<Answer> answers_;
  std::set<int64_t> unreadable_;
  int64_t used_bytes_ = 0;  // up to here something was written
  int64_t completions_ = 0;
  std::thread thread_;
};

SimulatedStore::SimulatedStore(int64_t capacity_bytes, const Faults& faults, int64_t piece_bytes,
                               std::shared_ptr<VirtualTime> time)
    : capacity_bytes_(checked_extent_bytes(capacity_bytes)),
      faults_(faults),
      time_(std::move(time)),
      arena_(capacity_bytes_),
      dice_(faults.seed),
      queue_(*this, kDepth, piece_bytes, nullptr, kRetry,
             [this] { return std::chrono::microseconds(now_us()); }) {
  space_.add_slab(0, capacity_bytes_);
  in_transit_.reserve(kDepth);
  if (time_ == nullptr) thread_ = std::thread([this] { work(); });
}

SimulatedStore::~SimulatedStore() {
  queue_.stop();
  if (thread_.joinable()) thread_.join();
  while (!in_transit_.empty() || queue_.has_work()) poll();
}

void SimulatedStore::reserve(int64_t bytes) {
  if (bytes == 0) return;
  bytes = checked_extent_bytes(bytes);
  if (bytes > capacity_bytes_) {
    throw StoreError(
        {.kind = ErrorKind::no_space,
         .operation = Operation::reserve,
         .path = kName,
         .detail = fmt::format("wanted {} bytes, {} bytes are available", bytes, capacity_bytes_)});
  }
  space_.raise_limit(bytes);
}

Extent SimulatedStore::allocate(int64_t bytes) {
  bytes = checked_extent_bytes(bytes);
  const Extent extent = space_.allocate(bytes);
  if (extent.empty()) throw no_room(space_, bytes, kName);
  return extent;
}

void SimulatedStore::release(const Extent& extent) {
  const bool complete = space_.written(extent);
  StoreBase::release(extent);
  if (!complete) return;
  const MutexLock lock(mutex_);
  complete_bytes_ -= extent.bytes;
  least_complete_bytes_ = std::min(least_complete_bytes_, complete_bytes_);
}

int64_t SimulatedStore::complete_bytes() const {
  const MutexLock lock(mutex_);
  return complete_bytes_;
}

int64_t SimulatedStore::take_least_complete_bytes() {
  const MutexLock lock(mutex_);
  return std::exchange(least_complete_bytes_, complete_bytes_);
}

Target SimulatedStore::locate(const Transfer& transfer) {
  return {.fd = -1, .slab = 0, .sums = space_.sums(transfer.extent)};
}

void SimulatedStore::completed(Transfer& transfer) noexcept {
  ++completions_;
  if (transfer.kind == Transfer::Kind::write && !transfer.error) {
    const MutexLock lock(mutex_);
    unsynced_.push_back(transfer.extent);
    complete_bytes_ += transfer.extent.bytes;
  }
  StoreBase::completed(transfer);
}

// ---- the two drivers

void SimulatedStore::work() {
  while (!in_transit_.empty() || queue_.wait()) {
    take_up();
    if (in_transit_.empty()) continue;
    const size_t chosen = choose();
    std::this_thread::sleep_for(std::chrono::microseconds(in_transit_[chosen].due_us - now_us()));
    deliver(chosen);
  }
}

bool SimulatedStore::poll() {
  if (time_ == nullptr) return false;
  const int64_t before = completions_;
  take_up();
  if (completions_ == before) time_->advance();
  return true;
}

void SimulatedStore::take_up() {
  Piece piece;
  while (in_transit_.size() < kDepth && queue_.next(piece)) {
    const int64_t delay = delay_us();
    in_transit_.push_back({piece, now_us() + delay});
    if (time_ == nullptr) continue;
    time_->after(delay, [this] {
      while (!deliver(choose())) {
      }
    });
  }
}

int64_t SimulatedStore::now_us() const {
  if (time_ != nullptr) return time_->now_us();
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

int64_t SimulatedStore::delay_us() {
  if (faults_.delay_max <= faults_.delay_min && faults_.delay_min.count() == 0) return 0;
  count(&FaultCounts::delayed);
  const int64_t spread = std::max<int64_t>(0, (faults_.delay_max - faults_.delay_min).count());
  return faults_.delay_min.count() + dice_.below(spread + 1);
}

/// What is delivered next: the first that is due, or any.
size_t SimulatedStore::choose() {
  const auto first = std::min_element(in_transit_.begin(), in_transit_.end(),
                                      [](const auto& a, const auto& b) { return a.due_us < b.due_us; });
  const int64_t chosen =
      faults_.reorder ? dice_.below(static_cast<int64_t>(in_transit_.size())) : first - in_transit_.begin();
  if (chosen != 0) count(&FaultCounts::reordered);
  return static_cast<size_t>(chosen);
}

/// False if the piece has to be delivered again, for the rest.
bool SimulatedStore::deliver(size_t chosen) {
  Piece& piece = in_transit_[chosen].piece;
  const char* fault = "";
  Answer answer{now_us(), piece.writes(), piece.file_offset(), piece.left(), 0, ""};
  answer.result = carry_out(piece, fault);
  answer.fault = fault;
  if (time_ != nullptr) answers_.push_back(answer);
  if (!queue_.settle(piece, answer.result)) return false;
  in_transit_.erase(in_transit_.begin() + static_cast<std::ptrdiff_t>(chosen));
  // Time moves on to the next try, if nothing else moves it.
  const auto next_try = time_ != nullptr ? queue_.next_try_in() : std::nullopt;
  if (next_try)
    time_->after(std::chrono::duration_cast<std::chrono::microseconds>(*next_try).count() + 1, [] {});
  return true;
}

// ---- the kernel, played

// Moves bytes, returns how many, or a negative errno.
int64_t SimulatedStore::carry_out(const Piece& piece, const char*& fault) {
  if (strikes(faults_.interrupted, &FaultCounts::interrupted)) {
    fault = "interrupted";
    return dice_.happens(0.5) ? -EINTR : -EAGAIN;
  }
  if (passing(piece)) {
    fault = "passing error";
    return piece.writes() || dice_.happens(0.5) ? -ENOMEM : -EIO;
  }
  if (fails(piece)) {
    fault = "error";
    return -(piece.writes() ? faults_.write_errno : faults_.read_errno);
  }
  int64_t bytes = piece.left();
  if (bytes > kBlockBytes && strikes(faults_.short_transfer, &FaultCounts::short_transfers)) {
    fault = "short";
    bytes = kBlockBytes + dice_.below(bytes - kBlockBytes);  // not always at a block boundary
  }
  piece.writes() ? land(piece, bytes, fault) : fetch(piece, bytes, fault);
  return bytes;
}

bool SimulatedStore::passing(const Piece& piece) {
  if (faults_.passing_error <= 0 || piece.retries >= kPassingErrorsMax) return false;
  return strikes(piece.retries == 0 ? faults_.passing_error : 0.5, &FaultCounts::passing_errors);
}

/// A place whose read has failed fails until it is written.
bool SimulatedStore::fails(const Piece& piece) {
  if (piece.writes()) {
    unreadable_.erase(piece.file_offset());
    return strikes(faults_.write_error, &FaultCounts::write_errors);
  }
  if (unreadable_.contains(piece.file_offset())) return true;
  if (!strikes(faults_.read_error, &FaultCounts::read_errors)) return false;
  unreadable_.insert(piece.file_offset());
  return true;
}

void SimulatedStore::land(const Piece& piece, int64_t bytes, const char*& fault) {
  int64_t at = piece.file_offset();
  used_bytes_ = std::max(used_bytes_, at + bytes);
  if (strikes(faults_.lost_write, &FaultCounts::lost_writes)) {
    fault = "lost";
    return;
  }
  if (strikes(faults_.misdirected_write, &FaultCounts::misdirected_writes)) {
    fault = "misdirected";
    at = elsewhere(piece, bytes);
  }
  std::memcpy(arena_.at(at), piece.memory(), static_cast<size_t>(bytes));
  if (strikes(faults_.bit_flip_at_rest, &FaultCounts::bit_flips_at_rest)) {
    fault = "flipped at rest";
    // In the first block, here and below: what lies behind the last whole block is moved again after a short
    // transfer.
    arena_.at(at)[dice_.below(kBlockBytes)] ^= std::byte{1} << static_cast<int>(dice_.below(8));
  }
}

void SimulatedStore::fetch(const Piece& piece, int64_t bytes, const char*& fault) {
  int64_t at = piece.file_offset();
  if (strikes(faults_.misdirected_read, &FaultCounts::misdirected_reads)) {
    fault = "misdirected";
    at = elsewhere(piece, bytes);
  }
  std::memcpy(piece.memory(), arena_.at(at), static_cast<size_t>(bytes));
  if (strikes(faults_.bit_flip_on_read, &FaultCounts::bit_flips)) {
    fault = "flipped";
    piece.memory()[dice_.below(kBlockBytes)] ^= std::byte{1} << static_cast<int>(dice_.below(8));
  }
}

/// Another place, in what was written so far if there is one.
int64_t SimulatedStore::elsewhere(const Piece& piece, int64_t bytes) {
  const int64_t places = std::max<int64_t>(2, (used_bytes_ - bytes) / kBlockBytes + 1);
  int64_t place = dice_.below(places);
  if (place * kBlockBytes == piece.file_offset()) place = (place + 1) % places;
  return std::min(place * kBlockBytes, capacity_bytes_ - round_up_to_block(bytes));
}

bool SimulatedStore::strikes(double probability, int64_t FaultCounts::*counter) {
  if (!dice_.happens(probability)) return false;
  count(counter);
  return true;
}

void SimulatedStore::count(int64_t FaultCounts::*counter) {
  const MutexLock lock(mutex_);
  ++(counts_.*counter);
}

FaultCounts SimulatedStore::fault_counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

Export SimulatedStore::export_extents(std::span<const Extent> extents, const std::filesystem::path& folder,
                                      ExportPace& pace) {
  if (dice_.happens(faults_.export_error)) {
    count(&FaultCounts::export_errors);
    errno = ENOSPC;
    throw system_error(Operation::write, folder, "injected");
  }
  const HeldExtents held(space_, extents);
  int64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.bytes;
  ExtentFile file(folder, "memory", bytes);
  Export out;
  for (const Extent& extent : extents) {
    const auto sums = space_.sums(extent);
    out.extents.push_back(
        {file.path().filename().string(), file.bytes(), extent.bytes, {sums.begin(), sums.end()}, false});
    file.append(arena_.of(extent));
    pace.copied_bytes += extent.bytes;
  }
  file.finish();
  sync_folder(folder);
  const MutexLock lock(mutex_);
  std::erase_if(unsynced_, [&](const Extent& one) {
    return std::find(extents.begin(), extents.end(), one) != extents.end();
  });
  return out;
}

void SimulatedStore::cut() {
  const MutexLock lock(mutex_);
  for (const Extent& extent : unsynced_) {
    if (!space_.written(extent)) continue;
    if (dice_.happens(faults_.dropped_at_cut)) {
      std::ranges::fill(arena_.of(extent), kLost);
      ++counts_.dropped;
    } else if (dice_.happens(faults_.torn_at_cut)) {
      const int64_t kept_bytes = dice_.below(extent.bytes);
      std::ranges::fill(arena_.of(extent).subspan(static_cast<size_t>(kept_bytes)), kLost);
      ++counts_.torn;
    }
  }
  unsynced_.clear();
}

void SimulatedStore::flip_bit(const Extent& extent, int64_t bit) {
  arena_.of(extent)[static_cast<size_t>(bit / 8)] ^= std::byte{1} << static_cast<int>(bit % 8);
}

StoreStats SimulatedStore::stats() const {
  PathStats path = queue_.meter().read();
  path.path = kName;
  path.share = 1;
  path.reserved_bytes = space_.limit_bytes();
  path.retries = queue_.retries();
  StoreStats stats = base_stats({path});
  stats.reserved_bytes = space_.limit_bytes();
  stats.backend = fmt::format("memory, seed {}", faults_.seed);
  return stats;
}

}  // namespace

std::unique_ptr<MemoryStore> make_memory_store(int64_t capacity_bytes, const Faults& faults,
                                               int64_t piece_bytes, std::shared_ptr<VirtualTime> time) {
  if (faults.has_any() && time == nullptr) say_on_stderr(fmt::format("memory store: seed {}", faults.seed));
  return std::make_unique<SimulatedStore>(capacity_bytes, faults, piece_bytes, std::move(time));
}

}  // namespace overspill::io
