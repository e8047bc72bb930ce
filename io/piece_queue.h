// One path's transfers, cut into pieces and handed to a backend in order of priority. What every backend has
// in common lives here: the splitting, the checksums, and the judgement of each result.
//
// Threads: every method may be called from any thread. All memory is taken in the constructor.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "io/error.h"
#include "io/lane_meter.h"
#include "io/patience.h"
#include "io/stall_watch.h"
#include "io/store.h"

namespace overspill::io {

/// Where a transfer's bytes lie.
struct Target {
  int fd = -1;
  uint32_t slab = 0;
  std::span<uint64_t> sums;  // of the extent's 64 KiB blocks
};

/// The store behind the queue.
class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  /// Called under the queue's lock: must be short, must not call the queue.
  virtual Target locate(const Transfer& transfer) = 0;
  virtual std::string path_of(const Target& target) = 0;
  /// The queue retries for the first time. Called without the queue's locks, on the backend's thread.
  virtual void first_retry(const Error&) noexcept {}
  /// The queue was given up. Called on any thread, under any locks: the store has a thread without locks call
  /// fail_all().
  virtual void given_up() noexcept {}
  /// Called without locks once the transfer's last piece is done; `transfer.error` is set. The queue forgets
  /// it before.
  virtual void completed(Transfer& transfer) noexcept = 0;
};

/// A transfer some of whose pieces are issued.
struct Active {
  Transfer* transfer = nullptr;  // null with pieces: it was given up, and nobody waits for them
  Target target;
  int64_t issued_bytes = 0;
  int pieces = 0;              // issued and not finished
  std::optional<Error> error;  // the first piece's that failed
};

/// One request to the kernel: at most `piece_bytes` of a transfer.
struct Piece {
  Active* active = nullptr;
  Target target{};
  Transfer::Kind kind = Transfer::Kind::read;
  std::byte* start = nullptr;  // of its bytes in memory
  int64_t file_start = 0;      // of its bytes in the file
  int64_t offset = 0;          // in the extent, multiple of kChecksumBlockBytes
  int64_t bytes = 0;
  int64_t done = 0;     // multiple of kBlockBytes
  int fruitless = 0;    // attempts since `done` grew
  int retries = 0;      // after errors, with a wait before each
  bool reread = false;  // it differs from its checksums a second time if it differs again

  int ticket = -1;  // while the kernel has it

  bool writes() const { return kind == Transfer::Kind::write; }
  int fd() const { return target.fd; }
  // What is left to ask of the kernel.
  std::byte* memory() const { return start + done; }
  int64_t file_offset() const { return file_start + done; }
  int64_t left() const { return bytes - done; }
};

/// For tests: sees each result of the kernel (bytes, or a negative errno) and returns what the store shall
/// see instead.
using ResultHook =
    std::function<int64_t(bool writes, int64_t file_offset, int64_t asked_bytes, int64_t result)>;

class PieceQueue {
 public:
  static constexpr int kAheadPerDepth = 8;
  using Clock = std::function<std::chrono::nanoseconds()>;  // never going back

  /// `depth`: pieces a backend may have at the kernel at once. Beside them it may hold as many whose result
  /// is not settled, and kAheadPerDepth times as many that are checksummed and not yet issued.
  /// `clock`: of the waits before a further try; null: the machine's.
  PieceQueue(TransferOwner& owner, int depth, int64_t piece_bytes, ResultHook hook,
             const RetryPolicy& retry = {}, Clock clock = nullptr);

  /// A transfer whose `error` is set is completed with it, on the backend's thread.
  void push(Transfer& transfer);

  /// For a write that failed with `why`, was completed() and has another extent now: pushes it again after
  /// the wait before its next try. False if it was tried often enough, or the queue no longer waits.
  bool push_later(Transfer& transfer, const Error& why);

  /// The next piece by priority, checksummed if it is to be written; false if there is none. Completes what
  /// has failed or was cancelled on the way.
  bool next(Piece& piece);
  /// next() in two steps, for a backend that has more urgent work first: returns a piece of priority `from`
  /// or lower, for which checksum() must be called before the kernel gets it.
  bool take(Piece& piece, Transfer::Priority from);
  void checksum(const Piece& piece);
  /// Whether a transfer waits that overtakes write-behind.
  bool has_urgent_work();
  /// Whether next() has something to do.
  bool has_work();
  /// Blocks until it has; false once the queue is stopped and empty.
  bool wait();

  /// Time until the first waiting piece is due for another try; nothing if none waits.
  std::optional<std::chrono::nanoseconds> next_try_in();

  /// Looks at a result of the kernel (bytes, or a negative errno): false if the piece must be issued again,
  /// for what is left of it. Otherwise the piece was given back: it is over, or the queue will hand it out
  /// again when its wait before another try is over.
  bool settle(Piece& piece, int64_t result);

  // Called before and after the kernel's work on a piece, so that a piece without an answer can be named.
  void asked(Piece& piece);
  void answered(Piece& piece);
  /// Of what the kernel has; nothing where it has nothing. As StallWatch::Party.
  std::optional<std::chrono::nanoseconds> silent_since();
  std::optional<Unanswered> unanswered();

  /// Gives the queue up: all transfers, later ones too, complete with `why`, in fail_all(). The kernel may
  /// still work on pieces that it has, but their results are ignored. The first call wins.
  void give_up(const Error& why);
  void fail_all();
  bool is_given_up();
  /// The kernel was given up while it had pieces: their memory must stay as long as the process lives.
  bool kernel_keeps_memory();

  /// From now on transfers that are not issued complete with `cancelled`.
  void stop();

  // The backend's threads, so that whoever ends the store need not join one that hangs.
  void threads_begin(int threads);
  void thread_ends();
  /// Once stopped, and not from a call to the owner: those under way have ended, too. False: the queue is
  /// given up and some thread may never end. None looks at a transfer or at the owner any more; the backend,
  /// the queue and the files must stay.
  bool wait_for_threads();

  int depth() const { return depth_; }
  LaneMeter& meter() { return meter_; }
  const LaneMeter& meter() const { return meter_; }
  RetryStats retries() const;

 private:
  static constexpr int kPriorities = 3;
  struct Fifo {
    Transfer* first = nullptr;
    Transfer* last = nullptr;
    Active* current = nullptr;  // taken off the list, not all of it issued
  };
  /// A piece that failed and waits for another try.
  struct Waiting {
    Piece piece;
    std::chrono::nanoseconds due;
  };
  /// What the kernel has.
  struct AtKernel {
    bool used = false;
    Transfer::Kind kind{};
    Target target{};
    int64_t offset_bytes = 0;
    int64_t length_bytes = 0;
    std::chrono::nanoseconds since{};
  };
  /// While it lives a thread may look at the piece's transfer and at the owner, unless the queue was given up
  /// before.
  class Looking {
   public:
    explicit Looking(PieceQueue& queue);
    ~Looking();
    Looking(const Looking&) = delete;
    Looking& operator=(const Looking&) = delete;
    bool allowed() const { return allowed_; }

   private:
    PieceQueue& queue_;
    bool allowed_;
  };
  /// Of a result.
  struct Verdict {
    enum class What : uint8_t { over, at_once, later } what = What::over;
    std::optional<Error> error{};             // over: the piece's; later: why
    std::atomic<int64_t>* counter = nullptr;  // of later
  };

  static void count(std::atomic<int64_t>& one) { one.fetch_add(1, std::memory_order_relaxed); }
  Active& start(Fifo& fifo) REQUIRES(mutex_);
  Transfer* advance(Fifo& fifo, Piece& piece, bool& got_piece) REQUIRES(mutex_);
  Transfer* retire(Active& active) REQUIRES(mutex_);
  void complete(Transfer& transfer) EXCLUDES(mutex_);
  void tell_given_up() EXCLUDES(mutex_);
  void call_ends() EXCLUDES(mutex_);
  Fifo* first_pending(Transfer::Priority from) REQUIRES(mutex_);
  void append(Transfer& transfer) REQUIRES(mutex_);
  void append_due() REQUIRES(mutex_);
  bool pending() REQUIRES(mutex_) {
    append_due();
    return first_due(Transfer::Priority::demand) != waiting_.end() ||
           first_pending(Transfer::Priority::demand) != nullptr;
  }
  std::vector<Waiting>::iterator first_due(Transfer::Priority from) REQUIRES(mutex_);
  std::optional<std::chrono::nanoseconds> earliest_due() const REQUIRES(mutex_);
  Verdict judge(Piece& piece, int64_t result);
  Verdict judge_error(Piece& piece, int os_error);
  bool try_later(Piece& piece, const Error& why, std::atomic<int64_t>& counter);
  const AtKernel* longest_at_kernel() const REQUIRES(mutex_);
  Transfer* next_to_fail() EXCLUDES(mutex_);
  void let_go(Active& active) REQUIRES(mutex_);
  void compute_checksums(const Piece& piece) const;
  void finish(Piece& piece, std::optional<Error> error);
  Error failure(const Piece& piece, ErrorKind kind, int os_error, std::string detail) const;
  std::optional<Error> verify(const Piece& piece) const;
  static std::span<uint64_t> sums_of(const Piece& piece, std::span<uint64_t> extent_sums);

  TransferOwner& owner_;
  const int depth_;
  const int64_t piece_bytes_;
  const ResultHook hook_;
  const RetryPolicy retry_;
  const Clock clock_;
  std::atomic<int64_t> at_once_ = 0;
  std::atomic<int64_t> reads_ = 0;
  std::atomic<int64_t> writes_ = 0;
  std::atomic<int64_t> shortages_ = 0;
  std::atomic<int64_t> checksums_ = 0;

  Mutex mutex_;
  LaneMeter meter_;  // counts under the lock
  Condition work_;
  std::array<Fifo, kPriorities> fifos_ GUARDED_BY(mutex_);
  std::vector<Active> actives_ GUARDED_BY(mutex_);
  std::vector<Active*> free_ GUARDED_BY(mutex_);
  std::vector<Waiting> waiting_ GUARDED_BY(mutex_);  // capacity as for actives_
  Transfer* later_ GUARDED_BY(mutex_) = nullptr;     // pushed when they are due; a list, in no order
  std::vector<AtKernel> at_kernel_ GUARDED_BY(mutex_);
  std::chrono::nanoseconds last_answer_ GUARDED_BY(mutex_){};
  std::optional<Error> given_up_ GUARDED_BY(mutex_);
  bool has_retried_ GUARDED_BY(mutex_) = false;
  int looking_ GUARDED_BY(mutex_) = 0;
  int calls_ GUARDED_BY(mutex_) = 0;  // to the owner, under way without the lock
  int threads_ GUARDED_BY(mutex_) = 0;
  Condition quiet_;
  bool stopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace overspill::io
