#include "io/file_store.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "base/mutex.h"
#include "io/backend.h"
#include "io/balance.h"
#include "io/block_device.h"
#include "io/job_folder.h"
#include "io/kept.h"
#include "io/own_process.h"
#include "io/piece_queue.h"
#include "io/say.h"
#include "io/slab_export.h"
#include "io/slab_share.h"
#include "io/speed_test.h"
#include "io/stall_watch.h"
#include "io/store_base.h"

namespace overspill::io {
namespace {

// One reservation makes about this many slabs at most: each is an open file.
constexpr int64_t kSlabsPerReservation = 64;
// Several paths together reserve this part of the reservation more.
constexpr int64_t kSlackPart = 8;
// Writing, then reading, at open.
constexpr std::chrono::milliseconds kSpeedPhase{150};

// A path that is full keeps what it has; a broken one is not trusted with new data either.
bool is_full(ErrorKind kind) {
  return kind == ErrorKind::no_space || kind == ErrorKind::quota;
}
bool is_broken(ErrorKind kind) {
  return kind == ErrorKind::device || kind == ErrorKind::denied || kind == ErrorKind::vanished;
}

StoreError invalid(Operation operation, std::string detail) {
  return StoreError({.kind = ErrorKind::invalid, .operation = operation, .detail = std::move(detail)});
}

class FileStore final : public StoreBase<Store> {
 public:
  explicit FileStore(const FileStoreOptions& options);
  ~FileStore() override;

  void reserve(int64_t bytes) override;
  Extent allocate(int64_t bytes) override;
  Export export_extents(std::span<const Extent> extents, const std::filesystem::path& folder) override;
  bool share_lives(uint64_t share) const override { return shares_.alive(share); }
  void share_named(uint64_t share, const std::filesystem::path& folder, const std::string& prefix) override {
    shares_.named(share, folder, prefix);
  }
  void end_share(uint64_t share) noexcept override { shares_.end(share); }
  void register_memory(std::span<std::byte> memory) override;
  void unregister_memory(std::span<std::byte> memory) override;
  std::string file_of(const Extent& extent) const override;
  StoreStats stats() const override;
  std::shared_ptr<StallWatch> watch() const override { return watch_; }
  bool kernel_keeps_memory() override;

 private:
  // What works on one path.
  struct Lane {
    Lane(FileStore& store, const std::filesystem::path& base, const FileStoreOptions& options)
        : path(base.string()),
          folder(base, options.job, options.direct),
          numa_node(numa_node_of(disks_of(base))),
          queue(store, options.queue_depth, options.piece_bytes, options.result_hook,
                options.patience.retry) {}

    const std::string path;
    JobFolder folder;
    const std::optional<int> numa_node;
    PieceQueue queue;
    std::unique_ptr<Backend> backend;
    std::atomic<int64_t> reserved_bytes = 0;  // changed by who grows
  };
  struct Slab {
    SlabFile file;
    size_t lane;
  };
  // What the backends' threads work on. Where one of these threads hangs, this is never freed.
  struct Parts {
    std::deque<Lane> lanes;
    std::deque<Slab> slabs;
  };
  // What a path had to say while space was taken.
  struct Growth {
    std::vector<Slab> made;
    std::vector<int64_t> capacity_bytes;
    std::vector<std::optional<StoreError>> refusals;
  };

  void enqueue(Transfer& transfer) override;
  void completed(Transfer& transfer) noexcept override;
  Target locate(const Transfer& transfer) override;
  std::string path_of(const Target& target) override;
  void first_retry(const Error& why) noexcept override;
  void given_up() noexcept override { watch_->wake(); }

  size_t lane_of(const Extent& extent) const EXCLUDES(slabs_mutex_);
  Extent place(int64_t bytes) EXCLUDES(balance_mutex_, slabs_mutex_);
  void explain_no_space(Transfer& transfer) noexcept;
  bool move_elsewhere(Transfer& transfer) noexcept;
  bool write_later(Transfer& transfer) noexcept;
  void close(size_t lane, const Error& error) EXCLUDES(balance_mutex_, slabs_mutex_);
  static void warn(const Lane& lane, const std::string& what);
  void set_first_weights(const FileStoreOptions& options);
  void follow_speeds() REQUIRES(balance_mutex_);

  void grow_to(int64_t bytes) REQUIRES(grow_mutex_);
  bool grow_lane(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) REQUIRES(grow_mutex_);
  void add_slab_for(int64_t bytes) REQUIRES(grow_mutex_);
  bool make_slab(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) REQUIRES(grow_mutex_);
  void adopt(Growth& growth) REQUIRES(grow_mutex_) EXCLUDES(slabs_mutex_);
  void undo(Growth& growth) REQUIRES(grow_mutex_);
  StoreError too_small(int64_t wanted_bytes, const Growth& growth, std::span<const int64_t> parts) const;
  size_t slab_count() const EXCLUDES(slabs_mutex_);
  void stop();

  const std::string job_;
  const int64_t slab_bytes_;

  const OwnProcess process_;
  std::shared_ptr<Parts> parts_ = std::make_shared<Parts>();
  std::deque<Lane>& lanes_ = parts_->lanes;

  Mutex grow_mutex_ ACQUIRED_BEFORE(balance_mutex_, slabs_mutex_);  // held while files grow
  std::vector<bool> warned_of_room_ GUARDED_BY(grow_mutex_);        // by lane
  mutable SharedMutex slabs_mutex_;
  std::deque<Slab>& slabs_ GUARDED_BY(slabs_mutex_) = parts_->slabs;  // only grows; its entries never move
  const std::shared_ptr<StallWatch> watch_;
  SlabShares shares_;
  mutable Mutex balance_mutex_ ACQUIRED_BEFORE(slabs_mutex_);
  Balance balance_ GUARDED_BY(balance_mutex_);
  std::vector<std::string> closed_ GUARDED_BY(balance_mutex_);  // by lane: why it takes no new data
};

std::unique_ptr<Backend> make_backend(PieceQueue& queue, const FileStoreOptions& options) {
  using Choice = FileStoreOptions::Backend;
  std::string refusal;
  if (options.backend != Choice::threads) {
    if (auto backend = make_uring_backend(queue, refusal)) return backend;
    if (options.backend == Choice::uring) {
      throw StoreError({.kind = ErrorKind::unsupported, .operation = Operation::open, .detail = refusal});
    }
  }
  return make_thread_backend(queue, std::clamp(options.threads, 1, options.queue_depth), refusal);
}

FileStore::FileStore(const FileStoreOptions& options)
    : job_(options.job),
      slab_bytes_(round_up_to_block(options.slab_bytes)),
      warned_of_room_(options.paths.size()),
      watch_(std::make_shared<StallWatch>(options.patience.stall)),
      shares_(watch_.get()),
      balance_(options.paths.size()),
      closed_(options.paths.size()) {
  if (options.slab_bytes <= 0)
    throw invalid(Operation::open, fmt::format("slabs of {} bytes", options.slab_bytes));
  if (!options.speeds.empty() && options.speeds.size() != options.paths.size()) {
    throw invalid(Operation::open, fmt::format("{} speeds are given for {} paths", options.speeds.size(),
                                               options.paths.size()));
  }
  try {
    for (const auto& path : options.paths) {
      Lane& lane = lanes_.emplace_back(*this, path, options);
      const NearNode bound(lane.numa_node);  // the backend's threads inherit it
      lane.backend = make_backend(lane.queue, options);
      watch_->add({.path = lane.path,
                   .silent_since = [&lane] { return lane.queue.silent_since(); },
                   .unanswered = [&lane] { return lane.queue.unanswered(); },
                   .give_up = [&lane](const Error& why) { lane.queue.give_up(why); },
                   .tend = [&lane] { lane.queue.fail_all(); }});
    }
    watch_->start();
    set_first_weights(options);
  } catch (...) {
    stop();
    throw;
  }
}

// One path needs no shares, so it is not measured.
void FileStore::set_first_weights(const FileStoreOptions& options) {
  std::vector<PathSpeed> speeds = options.speeds;
  if (speeds.empty() && lanes_.size() > 1) {
    std::vector<const JobFolder*> folders;
    for (const Lane& lane : lanes_) folders.push_back(&lane.folder);
    speeds = measure_speeds(folders, kSpeedPhase);
  }
  for (size_t i = 0; i < speeds.size(); ++i) lanes_[i].queue.meter().seed(speeds[i]);
  const MutexLock lock(balance_mutex_);
  follow_speeds();
}

// The weights as they are measured now; a path that is not measured counts as the others' mean.
void FileStore::follow_speeds() {
  double sum = 0;
  int known = 0;
  const auto speed_of = [&](size_t i) { return step_bytes_per_s(lanes_[i].queue.meter().speed()); };
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const double speed = speed_of(i);
    sum += speed;
    known += speed > 0 ? 1 : 0;
  }
  if (known == 0) return;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const double speed = speed_of(i);
    balance_.set_weight(i, speed > 0 ? speed : sum / known);
  }
}

FileStore::~FileStore() {
  stop();
}

bool FileStore::kernel_keeps_memory() {
  return std::ranges::any_of(lanes_, [](Lane& lane) { return lane.queue.kernel_keeps_memory(); });
}

void FileStore::stop() {
  if (!process_.here()) {
    keep_for_ever(watch_);
    keep_for_ever(parts_);
    return;
  }
  for (Lane& lane : lanes_) {
    lane.queue.stop();
    if (lane.backend != nullptr) lane.backend->end();
  }
  // Where the run has set a deadline, the watch gives up a path that hangs while this waits for it.
  std::vector<Lane*> ended;
  for (Lane& lane : lanes_) {
    if (lane.queue.wait_for_threads() && !lane.queue.is_given_up()) ended.push_back(&lane);
  }
  watch_->stop();
  if (ended.size() < lanes_.size()) keep_for_ever(parts_);
  // A callback may have submitted to a lane that had ended already: these are cancelled here.
  Piece piece;
  for (bool found = true; found;) {
    found = false;
    for (Lane& lane : lanes_) {
      lane.queue.fail_all();
      if (!lane.queue.has_work()) continue;
      found = true;
      lane.queue.next(piece);
    }
  }
  // Until here a callback could still submit, which wakes the backend.
  for (Lane* lane : ended) lane->backend.reset();
}

void FileStore::reserve(int64_t bytes) {
  if (bytes == 0) return;
  bytes = checked_extent_bytes(bytes);
  const MutexLock lock(grow_mutex_);
  if (bytes > space_.slab_bytes() || (lanes_.size() > 1 && bytes > space_.limit_bytes())) grow_to(bytes);
  space_.raise_limit(bytes);
}

// Slabs of at least `bytes` in all, by weight, or none. Several paths get a little more where they have room,
// so that their shares may move.
void FileStore::grow_to(int64_t bytes) {
  std::vector<double> weights;
  {
    const MutexLock lock(balance_mutex_);
    follow_speeds();
    for (size_t i = 0; i < lanes_.size(); ++i)
      weights.push_back(balance_.is_open(i) ? balance_.weight(i) : 0);
  }
  Growth growth{.made = {}, .capacity_bytes = {}, .refusals = {}};
  growth.refusals.resize(lanes_.size());
  for (const Lane& lane : lanes_) {
    // A path that is alone, or gone, is asked for all of it: its refusal has the numbers and the reason.
    std::error_code error;
    const bool ask = lanes_.size() == 1 || !std::filesystem::exists(lane.folder.path(), error);
    growth.capacity_bytes.push_back(lane.reserved_bytes + (ask ? bytes : lane.folder.available_bytes()));
  }
  const int64_t with_slack = lanes_.size() == 1 ? bytes : bytes + bytes / kSlackPart;
  // Each round takes all that is wanted, or one path less.
  while (true) {
    const std::vector<int64_t> parts = apportion(with_slack, weights, growth.capacity_bytes);
    if (std::accumulate(parts.begin(), parts.end(), int64_t{0}) < bytes) {
      undo(growth);
      throw too_small(bytes, growth, parts);
    }
    bool all = true;
    for (size_t i = 0; i < lanes_.size() && all; ++i)
      all = grow_lane(i, parts[i] - lanes_[i].reserved_bytes, bytes - space_.slab_bytes(), growth);
    std::vector<bool> open(lanes_.size());
    {
      const MutexLock lock(balance_mutex_);
      for (size_t i = 0; i < lanes_.size(); ++i) open[i] = balance_.is_open(i);
    }
    for (size_t i = 0; i < lanes_.size(); ++i) weights[i] = open[i] ? weights[i] : 0;
    if (!all) continue;
    const std::vector<int64_t> unlimited(lanes_.size(), std::numeric_limits<int64_t>::max() / 2);
    const std::vector<int64_t> fair = apportion(bytes, weights, unlimited);
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (parts[i] < fair[i] && open[i] && !warned_of_room_[i]) {
        warned_of_room_[i] = true;
        warn(lanes_[i],
             fmt::format("has room for {} of the {} bytes that its speed is worth; the other paths "
                         "take the rest",
                         parts[i], fair[i]));
      }
    }
    break;
  }
  adopt(growth);
}

// False: the path refused, and its capacity is what it has.
bool FileStore::grow_lane(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) {
  const int64_t usual =
      round_up_to_block(std::max(std::min(slab_bytes_, bytes), wanted_bytes / kSlabsPerReservation));
  for (int64_t left = bytes; left > 0;) {
    const int64_t size = std::min(left, usual);
    if (!make_slab(lane, size, wanted_bytes, growth)) return false;
    left -= size;
  }
  return true;
}

size_t FileStore::slab_count() const {
  const ReaderLock lock(slabs_mutex_);
  return slabs_.size();
}

bool FileStore::make_slab(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) {
  const auto number = static_cast<uint32_t>(slab_count() + growth.made.size());
  try {
    growth.made.push_back({lanes_[lane].folder.create_slab(number, bytes, wanted_bytes, watch_.get()), lane});
  } catch (const StoreError& error) {
    growth.capacity_bytes[lane] = lanes_[lane].reserved_bytes;
    growth.refusals[lane] = error;
    if (is_broken(error.error().kind)) close(lane, error.error());
    return false;
  }
  lanes_[lane].reserved_bytes += bytes;
  return true;
}

void FileStore::undo(Growth& growth) {
  for (const Slab& slab : growth.made) {
    ::unlink(slab.file.path.c_str());
    lanes_[slab.lane].reserved_bytes -= slab.file.bytes;
  }
}

void FileStore::adopt(Growth& growth) {
  const MutexLock lock(slabs_mutex_);
  for (Slab& slab : growth.made) {
    space_.add_slab(static_cast<int>(slab.lane), slab.file.bytes);
    slabs_.push_back(std::move(slab));
  }
}

StoreError FileStore::too_small(int64_t wanted_bytes, const Growth& growth,
                                std::span<const int64_t> parts) const {
  if (lanes_.size() == 1 && growth.refusals[0]) return *growth.refusals[0];
  Error error{.kind = ErrorKind::no_space, .operation = Operation::reserve};
  error.detail = fmt::format("wanted {} bytes over {} paths", wanted_bytes, lanes_.size());
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const Lane& lane = lanes_[i];
    error.path += (i > 0 ? ", " : "") + lane.path;
    error.detail += fmt::format("; {}: wanted {}, {} available beside {} reserved{}", lane.path, parts[i],
                                lane.folder.available_bytes(), lane.reserved_bytes.load(),
                                growth.refusals[i] ? fmt::format(" ({})", growth.refusals[i]->what()) : "");
  }
  return StoreError(std::move(error));
}

// One more slab, long enough for an extent that the reservation promises and fragmentation refuses.
void FileStore::add_slab_for(int64_t bytes) {
  Growth growth{.made = {}, .capacity_bytes = std::vector<int64_t>(lanes_.size(), 0), .refusals = {}};
  growth.refusals.resize(lanes_.size());
  uint64_t refused = 0;
  while (true) {
    std::optional<size_t> lane;
    {
      const MutexLock lock(balance_mutex_);
      lane = balance_.next(bytes, refused);
    }
    if (!lane) throw too_small(bytes, growth, std::vector<int64_t>(lanes_.size(), bytes));
    if (make_slab(*lane, bytes, bytes, growth)) return adopt(growth);
    refused |= uint64_t{1} << *lane;
  }
}

// On the path that is furthest behind its share and has room; an empty extent where none has.
Extent FileStore::place(int64_t bytes) {
  const MutexLock lock(balance_mutex_);
  if (lanes_.size() > 1) follow_speeds();
  for (uint64_t refused = 0;;) {
    const auto lane = balance_.next(bytes, refused);
    if (!lane) return {};
    const Extent extent = space_.allocate(bytes, static_cast<int>(*lane));
    if (!extent.empty()) {
      balance_.took(*lane, bytes);
      return extent;
    }
    refused |= uint64_t{1} << *lane;
  }
}

Extent FileStore::allocate(int64_t bytes) {
  bytes = checked_extent_bytes(bytes);
  if (const Extent extent = place(bytes); !extent.empty()) return extent;
  // A reservation is a promise in bytes: where only fragmentation is in the way, another slab keeps it.
  const MutexLock lock(grow_mutex_);
  Extent extent = place(bytes);
  if (extent.empty() && space_.within_limit(bytes)) {
    add_slab_for(bytes);
    extent = place(bytes);
  }
  if (!extent.empty()) return extent;
  throw no_room(space_, bytes, lanes_.front().folder.path().string());
}

size_t FileStore::lane_of(const Extent& extent) const {
  const ReaderLock lock(slabs_mutex_);
  return extent.slab < slabs_.size() ? slabs_[extent.slab].lane : 0;
}

void FileStore::enqueue(Transfer& transfer) {
  Lane& lane = lanes_[lane_of(transfer.extent)];
  lane.queue.push(transfer);
  lane.backend->wake();
}

// A path that refuses a write takes no more, and what it refused goes elsewhere: nothing was lost yet.
void FileStore::completed(Transfer& transfer) noexcept {
  if (transfer.error && transfer.held && transfer.kind == Transfer::Kind::write &&
      transfer.error->kind == ErrorKind::no_space) {
    explain_no_space(transfer);
  }
  if (transfer.error && transfer.held && transfer.kind == Transfer::Kind::write &&
      (is_full(transfer.error->kind) || is_broken(transfer.error->kind))) {
    close(lane_of(transfer.extent), *transfer.error);
    if (move_elsewhere(transfer)) return;
  }
  if (transfer.error && transfer.held && transfer.kind == Transfer::Kind::write &&
      may_pass_elsewhere(transfer.error->os_error) && write_later(transfer)) {
    return;
  }
  StoreBase::completed(transfer);
}

// The space of a slab was taken before the first step. A write that finds none means that another file shares
// the slab's blocks, so that the file system needs new ones.
void FileStore::explain_no_space(Transfer& transfer) noexcept {
  const ReaderLock lock(slabs_mutex_);
  const Extent& extent = transfer.extent;
  if (!has_shared_blocks(slabs_[extent.slab].file.fd.get(), extent.offset, extent.bytes)) return;
  transfer.error->detail +=
      "the space was reserved, but another file shares these blocks, so a write takes new room: a copy by "
      "reflinks (cp makes them on XFS; cp --reflink=never does not) or a snapshot";
}

bool FileStore::move_elsewhere(Transfer& transfer) noexcept {
  const Extent old = transfer.extent;
  {
    const MutexLock lock(balance_mutex_);
    if (balance_.is_open(lane_of(old))) return false;  // the last path: there is no elsewhere
  }
  try {
    const Extent fresh = allocate(old.bytes);
    space_.end(transfer.kind, old, false);
    space_.release(old);
    transfer.extent = fresh;
    transfer.error = space_.begin(transfer.kind, fresh);
  } catch (const StoreError&) {
    return false;  // no room on the others: the write's own error says more
  }
  enqueue(transfer);
  return true;
}

/// There is no other path, so it is written to another place of this one, where it has room: the place that
/// failed may be bad. That is released last, and so is not taken for the same bytes at once.
bool FileStore::write_later(Transfer& transfer) noexcept {
  Error why = std::move(*transfer.error);
  try {
    const Extent fresh = place(transfer.extent.bytes);
    if (!fresh.empty()) {
      space_.begin(transfer.kind, fresh);
      space_.end(transfer.kind, transfer.extent, false);
      space_.release(std::exchange(transfer.extent, fresh));
    }
  } catch (const std::exception&) {  // no memory: the same place
  }
  Lane& lane = lanes_[lane_of(transfer.extent)];
  transfer.error.reset();
  if (lane.queue.push_later(transfer, why)) {
    lane.backend->wake();
    return true;
  }
  if (transfer.retries > 0) {
    why.detail +=
        fmt::format("{}it was tried {} times", why.detail.empty() ? "" : "; ", transfer.retries + 1);
  }
  transfer.error = std::move(why);
  return false;
}

void FileStore::close(size_t number, const Error& error) {
  const std::string why = error.message();
  {
    const MutexLock lock(balance_mutex_);
    if (!balance_.close(number)) return;
    closed_[number] = why;
  }
  warn(lanes_[number], "takes no new data any more: " + why);
}

// Without a lock: a terminal that stands still keeps whoever writes to it waiting.
void FileStore::warn(const Lane& lane, const std::string& what) {
  say_on_stderr(fmt::format("overspill: warning: {} {}", lane.path, what));
}

Target FileStore::locate(const Transfer& transfer) {
  const ReaderLock lock(slabs_mutex_);
  const uint32_t slab = transfer.extent.slab;
  return {.fd = slabs_[slab].file.fd.get(), .slab = slab, .sums = space_.sums(transfer.extent)};
}

std::string FileStore::path_of(const Target& target) {
  const ReaderLock lock(slabs_mutex_);
  return slabs_[target.slab].file.path.string();
}

void FileStore::first_retry(const Error& why) noexcept {
  say_on_stderr(
      fmt::format("overspill: warning: {}. The read or write is tried again. This warning comes once for "
                  "each path; engine.stats() counts all retries",
                  why.cause()));
}

std::string FileStore::file_of(const Extent& extent) const {
  const ReaderLock lock(slabs_mutex_);
  return extent.slab < slabs_.size() ? slabs_[extent.slab].file.path.string() : "no slab of this store";
}

Export FileStore::export_extents(std::span<const Extent> extents, const std::filesystem::path& folder) {
  const HeldExtents held(space_, extents);
  std::vector<ExportItem> items;
  items.reserve(extents.size());
  for (const Extent& extent : extents) {
    const ReaderLock lock(slabs_mutex_);
    items.push_back({extent, &slabs_[extent.slab].file, space_.sums(extent)});
  }
  return export_items(items, folder, job_, shares_, watch_.get());
}

void FileStore::register_memory(std::span<std::byte> memory) {
  for (Lane& lane : lanes_) lane.backend->register_memory(memory);
}

void FileStore::unregister_memory(std::span<std::byte> memory) {
  for (Lane& lane : lanes_) lane.backend->unregister_memory(memory);
}

StoreStats FileStore::stats() const {
  std::vector<PathStats> paths;
  std::string backend;
  for (const Lane& lane : lanes_) {
    PathStats path = lane.queue.meter().read();
    path.path = lane.path;
    path.numa_node = lane.numa_node;
    const std::string& refusal = lane.folder.direct_refusal();
    path.access = lane.folder.direct() ? "O_DIRECT"
                  : refusal.empty()    ? "buffered"
                                       : fmt::format("buffered ({})", refusal);
    const std::string text = lane.backend->description(path.access) +
                             (lane.numa_node ? fmt::format(", NUMA node {}", *lane.numa_node) : "");
    // Paths that do the same are named once.
    if (backend.find(text) == std::string::npos) backend += (backend.empty() ? "" : "; ") + text;
    path.reserved_bytes = lane.reserved_bytes;
    path.retries = lane.queue.retries();
    path.stalls = watch_->stats(paths.size());
    paths.push_back(std::move(path));
  }
  {
    const MutexLock lock(balance_mutex_);
    for (size_t i = 0; i < lanes_.size(); ++i) {
      paths[i].share = balance_.share(i);
      paths[i].closed = closed_[i];
    }
  }
  StoreStats stats = base_stats(std::move(paths));
  stats.backend = std::move(backend);
  return stats;
}

}  // namespace

std::unique_ptr<Store> make_file_store(const FileStoreOptions& options) {
  return std::make_unique<FileStore>(options);
}

}  // namespace overspill::io
