#include "io/file_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "io/file_store_parts.h"
#include "io/kept.h"
#include "io/part_folder.h"
#include "io/say.h"
#include "io/slab_export.h"
#include "io/speed_test.h"

namespace overspill::io {
namespace {

// Writing, then reading, at open.
constexpr std::chrono::milliseconds kSpeedPhase{150};

StoreError invalid(Operation operation, std::string detail) {
  return StoreError({.kind = ErrorKind::invalid, .operation = operation, .detail = std::move(detail)});
}

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

}  // namespace

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
    for (const Lane& lane : lanes_) {
      for (const std::string& orphan : orphans(lane.folder.path().parent_path()))
        say_on_stderr("overspill: " + orphan);
    }
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

Export FileStore::export_extents(std::span<const Extent> extents, const std::filesystem::path& folder,
                                 ExportPace& pace) {
  const HeldExtents held(space_, extents);
  std::vector<ExportItem> items;
  items.reserve(extents.size());
  for (const Extent& extent : extents) {
    const ReaderLock lock(slabs_mutex_);
    items.push_back({extent, &slabs_[extent.slab].file, space_.sums(extent)});
  }
  return export_items(items, folder, job_, shares_, pace, watch_.get());
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

std::unique_ptr<Store> make_file_store(const FileStoreOptions& options) {
  return std::make_unique<FileStore>(options);
}

}  // namespace overspill::io
