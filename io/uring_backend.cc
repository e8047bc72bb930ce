#include <fmt/format.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "io/backend.h"
#include "io/unique_fd.h"

namespace overspill::io {
namespace {

constexpr uint64_t kWakeTag = ~uint64_t{0};
constexpr unsigned kFileSlots = 256;  // slabs beyond that go by descriptor
constexpr unsigned kBufferSlots = 128;
constexpr std::chrono::milliseconds kGivenUpPause{100};  // between looks whether the queue was given up
constexpr size_t kBufferBytesMax = size_t{1} << 30;      // the kernel's limit for one buffer

// The ring itself is broken: what is in flight can not be accounted for any more.
struct RingBroken {
  const char* what;
  int os_error;

  Error error() const {
    return {.kind = ErrorKind::ring, .operation = Operation::open, .os_error = os_error, .detail = what};
  }
};

// Pieces in order, in memory taken once.
class PieceRing {
 public:
  struct Entry {
    Piece piece;
    int64_t result = 0;
  };
  explicit PieceRing(size_t capacity) : entries_(capacity) {}

  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == entries_.size(); }
  size_t size() const { return count_; }
  void push(const Piece& piece, int64_t result = 0) {
    if (full()) throw RingBroken{"more pieces are held than were counted on", ENOBUFS};
    entries_[(first_ + count_++) % entries_.size()] = {piece, result};
  }
  Entry pop() {
    const Entry entry = entries_[first_];
    first_ = (first_ + 1) % entries_.size();
    --count_;
    return entry;
  }

 private:
  std::vector<Entry> entries_;
  size_t first_ = 0;
  size_t count_ = 0;
};

// Checksums are taken while the disk works: what has completed is verified after its successors were
// submitted, and what is written behind is checksummed while it waits for a free slot.
//
// A ring that only its own thread touches. What the kernel refuses is left out: flags, then files, then
// buffers.
class UringBackend final : public Backend {
 public:
  explicit UringBackend(PieceQueue& queue)
      : queue_(queue),
        slots_(static_cast<size_t>(queue.depth())),
        prepared_(PieceQueue::kAheadPerDepth * slots_.size()),
        again_(2 * slots_.size()),
        done_(2 * slots_.size()) {
    for (size_t i = slots_.size(); i-- > 0;) free_slots_.push_back(static_cast<uint32_t>(i));
  }

  /// 0, or the errno for which the kernel refused. SINGLE_ISSUER wants the ring created by the thread that
  /// uses it.
  int start() {
    wake_fd_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    if (!wake_fd_) return errno;
    std::promise<int> started;
    auto result = started.get_future();
    try {
      thread_ = std::thread([this, &started] { run(started); });
    } catch (const std::system_error& error) {
      return error.code().value();
    }
    return result.get();
  }

  ~UringBackend() override {
    if (!thread_.joinable()) return;
    end();
    thread_.join();
  }

  void end() override {
    stopping_ = true;
    signal();
  }

  void wake() override {
    if (asleep_.exchange(false)) signal();
  }

  void register_memory(std::span<std::byte> memory) override { ask({memory, true}); }
  void unregister_memory(std::span<std::byte> memory) override { ask({memory, false}); }

  std::string description(const std::string& access) const override {
    const MutexLock lock(mutex_);
    return "io_uring, " + access + (buffer_note_.empty() ? "" : ", " + buffer_note_);
  }

 private:
  struct Request {
    std::span<std::byte> memory;
    bool add;
    bool done = false;
  };
  struct Buffer {
    std::span<std::byte> memory;  // empty: slot is free
    const std::byte* region = nullptr;
  };

  void run(std::promise<int>& started);
  void close_ring();
  int open_ring();
  void loop();
  bool next(Piece& piece, bool& prepared);
  void issue_next();
  bool prepare_one();
  void settle_one();
  void submit(unsigned wait_for);
  void issue(uint32_t slot);
  void read_wake_fd();
  void reap();
  void serve_requests();
  int file_slot(const Target& target);
  int buffer_slot(const std::byte* memory, int64_t bytes) const;
  int add_buffers(std::span<std::byte> region);
  void remove_buffers(const std::byte* region);
  void ask(Request request);
  bool is_over() REQUIRES(mutex_) { return broken_ || queue_.is_given_up(); }
  io_uring_sqe* sqe();

  void signal() {
    const uint64_t one = 1;
    if (::write(wake_fd_.get(), &one, sizeof(one)) != sizeof(one))
      queue_.give_up(RingBroken{"waking the ring", errno}.error());
  }

  PieceQueue& queue_;
  UniqueFd wake_fd_;
  std::atomic<bool> asleep_ = false;
  std::atomic<bool> stopping_ = false;

  // The ring's thread only.
  io_uring ring_{};
  uint64_t wake_count_ = 0;
  std::vector<Piece> slots_;
  std::vector<uint32_t> free_slots_;
  PieceRing prepared_;  // to be written behind, checksummed
  PieceRing again_;     // short or interrupted, to go on
  PieceRing done_;      // at most twice the depth, since issue_next() stops at the depth; not looked at yet
  std::vector<int> file_slots_;  // by slab: registered descriptor or -1
  unsigned files_registered_ = 0;
  bool has_file_table_ = false;
  bool has_buffer_table_ = false;
  std::vector<Buffer> buffers_;

  mutable Mutex mutex_;
  Condition served_;
  std::shared_ptr<Request> request_ GUARDED_BY(mutex_);
  bool broken_ GUARDED_BY(mutex_) = false;
  std::string buffer_note_ GUARDED_BY(mutex_);

  std::thread thread_;
};

void UringBackend::run(std::promise<int>& started) {
  const int refused = open_ring();
  if (refused == 0) queue_.threads_begin(1);
  started.set_value(refused);
  if (refused != 0) return;
  try {
    loop();
    close_ring();
  } catch (const RingBroken& broken) {
    {
      const MutexLock lock(mutex_);
      broken_ = true;
    }
    served_.notify_all();
    queue_.give_up(broken.error());
  }
  queue_.thread_ends();
}

void UringBackend::close_ring() {
  // The kernel takes a ring apart some time after its end; the slabs' space and the memory shall be free at
  // once.
  if (has_file_table_) io_uring_unregister_files(&ring_);
  if (has_buffer_table_) io_uring_unregister_buffers(&ring_);
  io_uring_queue_exit(&ring_);
}

int UringBackend::open_ring() {
  int result = -EINVAL;
  for (const unsigned flags :
       {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        IORING_SETUP_SINGLE_ISSUER, 0U}) {
    result = io_uring_queue_init(static_cast<unsigned>(slots_.size()) + 4, &ring_, flags);
    if (result != -EINVAL) break;
  }
  if (result < 0) return -result;
  has_file_table_ = io_uring_register_files_sparse(&ring_, kFileSlots) == 0;
  return 0;
}

void UringBackend::loop() {
  read_wake_fd();
  while (true) {
    serve_requests();
    issue_next();
    if (!done_.empty()) {
      submit(0);
      settle_one();
      prepare_one();  // what its owner writes back is still in the cache
    } else if (prepare_one()) {
      submit(0);
    } else {
      const bool idle = free_slots_.size() == slots_.size();
      if (idle && stopping_ && !queue_.has_work()) return;
      // With all slots taken a completion comes first anyway. Otherwise whoever pushes after this store sees
      // it. Requests and the end need no such care: they always write to the eventfd, which a read in the
      // ring waits for.
      asleep_ = !free_slots_.empty();
      const bool stay_awake = !free_slots_.empty() && queue_.has_work();
      submit(stay_awake ? 0 : 1);
      asleep_ = false;
    }
    reap();
  }
}

void UringBackend::submit(unsigned wait_for) {
  if (wait_for == 0 && io_uring_sq_ready(&ring_) == 0) return;
  const auto next_try = wait_for > 0 && !free_slots_.empty() ? queue_.next_try_in() : std::nullopt;
  int result = 0;
  if (next_try) {
    using namespace std::chrono;
    const auto whole = duration_cast<seconds>(*next_try);
    __kernel_timespec wait{.tv_sec = whole.count(), .tv_nsec = (*next_try - whole).count()};
    io_uring_cqe* ignored = nullptr;
    result = io_uring_submit_and_wait_timeout(&ring_, &ignored, wait_for, &wait, nullptr);
    if (result == -ETIME) return;
  } else {
    result = io_uring_submit_and_wait(&ring_, wait_for);
  }
  if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY)
    throw RingBroken{"submit", -result};
}

// What was begun first; then by priority, where prepared pieces are the first of those written behind.
bool UringBackend::next(Piece& piece, bool& prepared) {
  prepared = true;
  PieceRing* waiting = !again_.empty() ? &again_ : nullptr;
  if (waiting == nullptr && !prepared_.empty() && !queue_.has_urgent_work()) waiting = &prepared_;
  if (waiting != nullptr) {
    piece = waiting->pop().piece;
    return true;
  }
  prepared = false;
  return queue_.take(piece, Transfer::Priority::demand);
}

// Fills the free slots. One piece that has to be checksummed first ends it: the disk shall not wait for a
// second one.
void UringBackend::issue_next() {
  bool prepared = true;
  while (!free_slots_.empty() && done_.size() < slots_.size()) {
    const uint32_t slot = free_slots_.back();
    if (!next(slots_[slot], prepared)) return;
    free_slots_.pop_back();
    const bool checksum = !prepared && slots_[slot].writes();
    if (checksum) queue_.checksum(slots_[slot]);
    issue(slot);
    if (checksum) return;
  }
}

bool UringBackend::prepare_one() {
  Piece piece;
  if (!free_slots_.empty() || prepared_.full()) return false;
  if (!queue_.take(piece, Transfer::Priority::write_behind)) return false;
  if (piece.writes()) queue_.checksum(piece);
  prepared_.push(piece);
  return true;
}

void UringBackend::settle_one() {
  auto [piece, result] = done_.pop();
  if (!queue_.settle(piece, result)) again_.push(piece);
}

io_uring_sqe* UringBackend::sqe() {
  // Room for every slot and the wake read, each of which has at most one entry, and for the timeout that an
  // old kernel takes as one.
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr) throw RingBroken{"the submission queue is full", ENOBUFS};
  return entry;
}

void UringBackend::read_wake_fd() {
  io_uring_sqe* entry = sqe();
  io_uring_prep_read(entry, wake_fd_.get(), &wake_count_, sizeof(wake_count_), 0);
  io_uring_sqe_set_data64(entry, kWakeTag);
}

void UringBackend::issue(uint32_t slot) {
  Piece& piece = slots_[slot];
  const auto bytes = static_cast<unsigned>(piece.left());
  const auto offset = static_cast<uint64_t>(piece.file_offset());
  const int file = file_slot(piece.target);
  const int fd = file >= 0 ? file : piece.fd();
  const int buffer = buffer_slot(piece.memory(), piece.left());
  io_uring_sqe* entry = sqe();
  if (piece.writes()) {
    buffer >= 0 ? io_uring_prep_write_fixed(entry, fd, piece.memory(), bytes, offset, buffer)
                : io_uring_prep_write(entry, fd, piece.memory(), bytes, offset);
  } else {
    buffer >= 0 ? io_uring_prep_read_fixed(entry, fd, piece.memory(), bytes, offset, buffer)
                : io_uring_prep_read(entry, fd, piece.memory(), bytes, offset);
  }
  if (file >= 0) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data64(entry, slot);
  queue_.asked(piece);
}

void UringBackend::reap() {
  io_uring_cqe* entry = nullptr;
  while (io_uring_peek_cqe(&ring_, &entry) == 0) {
    const uint64_t tag = io_uring_cqe_get_data64(entry);
    const int64_t result = entry->res;
    io_uring_cqe_seen(&ring_, entry);  // copied first: completions may take long
    if (tag == kWakeTag) {
      if (result < 0 && result != -EINTR && result != -EAGAIN)
        throw RingBroken{"reading the wake event", static_cast<int>(-result)};
      read_wake_fd();
      continue;
    }
    const auto slot = static_cast<uint32_t>(tag);
    queue_.answered(slots_[slot]);
    done_.push(slots_[slot], result);
    free_slots_.push_back(slot);
  }
}

// The table's slot of a slab, registered at its first use here, since only this thread may touch the ring.
int UringBackend::file_slot(const Target& target) {
  if (!has_file_table_) return -1;
  if (target.slab >= file_slots_.size()) file_slots_.resize(target.slab + 1, -1);
  int& slot = file_slots_[target.slab];
  if (slot < 0 && files_registered_ < kFileSlots &&
      io_uring_register_files_update(&ring_, files_registered_, &target.fd, 1) == 1) {
    slot = static_cast<int>(files_registered_++);
  }
  return slot;
}

int UringBackend::buffer_slot(const std::byte* memory, int64_t bytes) const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const auto& range = buffers_[i].memory;
    if (!range.empty() && memory >= range.data() && memory + bytes <= range.data() + range.size()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// A ring that hangs or is broken serves nobody: what was asked of it is left undone, and its memory must
// stay.
void UringBackend::ask(Request request) {
  const auto shared = std::make_shared<Request>(request);
  MutexLock lock(mutex_);
  while (request_ != nullptr && !is_over()) served_.wait_for(mutex_, kGivenUpPause);  // one at a time
  if (is_over()) return;
  request_ = shared;
  lock.unlock();
  signal();
  lock.lock();
  while (!shared->done && !is_over()) served_.wait_for(mutex_, kGivenUpPause);
}

void UringBackend::serve_requests() {
  {
    const MutexLock lock(mutex_);
    if (request_ == nullptr) return;
    if (request_->add) {
      const int result = add_buffers(request_->memory);
      if (result < 0) remove_buffers(request_->memory.data());
      buffer_note_ = result == 0 ? "registered buffers"
                                 : fmt::format("unregistered buffers (registration refused: {})",
                                               std::generic_category().message(-result));
    } else {
      remove_buffers(request_->memory.data());
    }
    request_->done = true;
    request_ = nullptr;
  }
  served_.notify_all();
}

int UringBackend::add_buffers(std::span<std::byte> region) {
  if (!has_buffer_table_) {
    if (const int result = io_uring_register_buffers_sparse(&ring_, kBufferSlots); result < 0) return result;
    has_buffer_table_ = true;
    buffers_.resize(kBufferSlots);
  }
  const std::byte* start = region.data();
  while (!region.empty()) {
    const auto part = region.first(std::min(region.size(), kBufferBytesMax));
    const auto free =
        std::find_if(buffers_.begin(), buffers_.end(), [](const Buffer& one) { return one.memory.empty(); });
    if (free == buffers_.end()) return -ENOBUFS;
    const iovec vector{part.data(), part.size()};
    const __u64 tag = 0;
    const auto slot = static_cast<unsigned>(free - buffers_.begin());
    if (const int result = io_uring_register_buffers_update_tag(&ring_, slot, &vector, &tag, 1); result < 0)
      return result;
    *free = {part, start};
    region = region.subspan(part.size());
  }
  return 0;
}

void UringBackend::remove_buffers(const std::byte* region) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].memory.empty() || buffers_[i].region != region) continue;
    const iovec none{nullptr, 0};
    const __u64 tag = 0;
    const int result = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(i), &none, &tag, 1);
    if (result < 0) throw RingBroken{"dropping a registered buffer", -result};
    buffers_[i] = {};
  }
}

}  // namespace

std::unique_ptr<Backend> make_uring_backend(PieceQueue& queue, std::string& refusal) {
  auto backend = std::make_unique<UringBackend>(queue);
  const int os_error = backend->start();
  if (os_error == 0) return backend;
  refusal = fmt::format("io_uring refused ({})", std::generic_category().message(os_error));
  return nullptr;
}

}  // namespace overspill::io
