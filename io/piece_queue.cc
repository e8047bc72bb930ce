#include "io/piece_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "io/checksum.h"

namespace overspill::io {
namespace {

std::chrono::nanoseconds machine_clock() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

}  // namespace

PieceQueue::PieceQueue(TransferOwner& owner, int depth, int64_t piece_bytes, ResultHook hook,
                       const RetryPolicy& retry, Clock clock)
    : owner_(owner),
      depth_(depth),
      piece_bytes_(piece_bytes / kChecksumBlockBytes * kChecksumBlockBytes),
      hook_(std::move(hook)),
      retry_(retry),
      clock_(clock != nullptr ? std::move(clock) : machine_clock),
      meter_(depth),
      // Each active transfer has a piece at the backend, or one that waits for another try, or is the current
      // one of its priority. No new piece is handed out while as many wait as fit at the kernel.
      actives_(static_cast<size_t>((kAheadPerDepth + 3) * depth + kPriorities)) {
  if (depth <= 0 || piece_bytes_ <= 0) {
    throw StoreError(
        {.kind = ErrorKind::invalid,
         .operation = Operation::open,
         .detail = fmt::format("queue depth {} and piece size {} must be positive, the latter at least {}",
                               depth, piece_bytes, kChecksumBlockBytes)});
  }
  free_.reserve(actives_.size());
  for (Active& active : actives_) free_.push_back(&active);
  waiting_.reserve(actives_.size());
  at_kernel_.resize(static_cast<size_t>(depth));
}

void PieceQueue::push(Transfer& transfer) {
  bool given_up = false;
  {
    const MutexLock lock(mutex_);
    append(transfer);
    given_up = given_up_.has_value();
    if (given_up) ++calls_;
  }
  given_up ? tell_given_up() : work_.notify_one();
}

void PieceQueue::append(Transfer& transfer) {
  meter_.pushed(transfer);
  transfer.next = nullptr;
  Fifo& fifo = fifos_[static_cast<size_t>(transfer.priority)];
  (fifo.last == nullptr ? fifo.first : fifo.last->next) = &transfer;
  fifo.last = &transfer;
}

bool PieceQueue::push_later(Transfer& transfer, const Error& why) {
  bool first = false;
  {
    const MutexLock lock(mutex_);
    if (stopped_ || given_up_ || transfer.retries >= retry_.tries_max) return false;
    ++transfer.retries;
    transfer.due_ns = (clock_() + retry_.wait_before(transfer.retries)).count();
    transfer.next = std::exchange(later_, &transfer);
    first = !std::exchange(has_retried_, true);
    if (first) ++calls_;
  }
  count(writes_);
  work_.notify_all();
  if (first) {
    owner_.first_retry(why);
    call_ends();
  }
  return true;
}

/// Once the queue is stopped or given up nothing waits any more.
void PieceQueue::append_due() {
  if (later_ == nullptr) return;
  const bool all = stopped_ || given_up_;
  const int64_t now_ns = clock_().count();
  for (Transfer** link = &later_; *link != nullptr;) {
    Transfer& transfer = **link;
    if (all || transfer.due_ns <= now_ns) {
      *link = transfer.next;
      append(transfer);
    } else {
      link = &transfer.next;
    }
  }
}

bool PieceQueue::next(Piece& piece) {
  if (!take(piece, Transfer::Priority::demand)) return false;
  if (piece.writes()) checksum(piece);
  return true;
}

bool PieceQueue::take(Piece& piece, Transfer::Priority from) {
  while (true) {
    bool got_piece = false;
    Transfer* over = nullptr;
    {
      const MutexLock lock(mutex_);
      append_due();
      if (const auto due = first_due(from); due != waiting_.end()) {
        piece = due->piece;
        waiting_.erase(due);
        meter_.issued(piece.active->transfer->kind);
        return true;
      }
      Fifo* fifo = first_pending(from);
      if (fifo == nullptr) return false;
      over = advance(*fifo, piece, got_piece);
    }
    if (over != nullptr) complete(*over);
    if (got_piece) return true;
  }
}

/// Once the queue is stopped nothing waits any more.
std::vector<PieceQueue::Waiting>::iterator PieceQueue::first_due(Transfer::Priority from) {
  if (waiting_.empty() || given_up_) return waiting_.end();
  const auto now = stopped_ ? std::chrono::nanoseconds::max() : clock_();
  return std::ranges::find_if(waiting_, [&](const Waiting& one) {
    return one.piece.active->transfer->priority >= from && one.due <= now;
  });
}

/// Nothing where nothing waits for another try.
std::optional<std::chrono::nanoseconds> PieceQueue::earliest_due() const {
  std::optional<std::chrono::nanoseconds> earliest;
  const auto consider = [&](std::chrono::nanoseconds due) {
    earliest = std::min(due, earliest.value_or(due));
  };
  for (const Waiting& one : waiting_) consider(one.due);
  for (const Transfer* one = later_; one != nullptr; one = one->next)
    consider(std::chrono::nanoseconds(one->due_ns));
  return earliest;
}

std::optional<std::chrono::nanoseconds> PieceQueue::next_try_in() {
  const MutexLock lock(mutex_);
  const auto due = earliest_due();
  if (!due) return std::nullopt;
  return std::max(std::chrono::nanoseconds(0), *due - clock_());
}

PieceQueue::Fifo* PieceQueue::first_pending(Transfer::Priority from) {
  if (given_up_ || std::ssize(waiting_) >= depth_) return nullptr;
  const auto found =
      std::find_if(fifos_.begin() + static_cast<ptrdiff_t>(from), fifos_.end(),
                   [](const Fifo& fifo) { return fifo.first != nullptr || fifo.current != nullptr; });
  return found == fifos_.end() ? nullptr : &*found;
}

bool PieceQueue::has_urgent_work() {
  const MutexLock lock(mutex_);
  append_due();
  if (first_due(Transfer::Priority::demand) != waiting_.end()) return true;
  const Fifo* fifo = first_pending(Transfer::Priority::demand);
  return fifo != nullptr && fifo != &fifos_[static_cast<size_t>(Transfer::Priority::write_behind)];
}

bool PieceQueue::has_work() {
  const MutexLock lock(mutex_);
  return pending();
}

bool PieceQueue::wait() {
  const MutexLock lock(mutex_);
  while (!stopped_ && !pending()) {
    if (const auto due = earliest_due()) {
      work_.wait_for(mutex_, *due - clock_());
    } else {
      work_.wait(mutex_);
    }
  }
  return pending();
}

void PieceQueue::stop() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
  }
  work_.notify_all();
}

Active& PieceQueue::start(Fifo& fifo) {
  Transfer& transfer = *std::exchange(fifo.first, fifo.first->next);
  if (fifo.first == nullptr) fifo.last = nullptr;
  meter_.started(transfer);
  Active& active = *free_.back();
  free_.pop_back();
  active = {.transfer = &transfer, .target = {}, .issued_bytes = 0, .pieces = 0, .error = transfer.error};
  if (!active.error && stopped_) {
    active.error =
        Error{.kind = ErrorKind::cancelled,
              .operation = transfer.kind == Transfer::Kind::write ? Operation::write : Operation::read,
              .offset_bytes = transfer.extent.offset,
              .length_bytes = transfer.extent.bytes};
  }
  if (!active.error) active.target = owner_.locate(transfer);
  if (transfer.second_reading) count(checksums_);
  fifo.current = &active;
  return active;
}

// One step under the lock: a piece, or a transfer that is over because nothing more of it is worth issuing,
// or neither.
Transfer* PieceQueue::advance(Fifo& fifo, Piece& piece, bool& got_piece) {
  Active& active = fifo.current != nullptr ? *fifo.current : start(fifo);
  if (active.error) {
    fifo.current = nullptr;
    return active.pieces == 0 ? retire(active) : nullptr;
  }
  const int64_t total = active.transfer->extent.bytes;
  piece = {.active = &active,
           .target = active.target,
           .kind = active.transfer->kind,
           .start = active.transfer->memory + active.issued_bytes,
           .file_start = active.transfer->extent.offset + active.issued_bytes,
           .offset = active.issued_bytes,
           .bytes = std::min(piece_bytes_, total - active.issued_bytes),
           .reread = active.transfer->second_reading};
  active.issued_bytes += piece.bytes;
  ++active.pieces;
  meter_.issued(active.transfer->kind);
  if (active.issued_bytes == total) fifo.current = nullptr;
  got_piece = true;
  return nullptr;
}

/// Its caller gives up the lock and hands the transfer to complete().
Transfer* PieceQueue::retire(Active& active) {
  Transfer* transfer = std::exchange(active.transfer, nullptr);
  transfer->error = std::move(active.error);
  active.error.reset();
  meter_.completed(*transfer);
  free_.push_back(&active);
  ++calls_;
  return transfer;
}

// ---- calls to the owner, without the lock; each was counted in calls_ under the lock that decided on it

void PieceQueue::complete(Transfer& transfer) {
  owner_.completed(transfer);
  call_ends();
}

void PieceQueue::tell_given_up() {
  owner_.given_up();
  call_ends();
}

void PieceQueue::call_ends() {
  const MutexLock lock(mutex_);
  if (--calls_ == 0) quiet_.notify_all();
}

// ---- what has no answer

void PieceQueue::asked(Piece& piece) {
  const MutexLock lock(mutex_);
  const auto free = std::ranges::find_if(at_kernel_, [](const AtKernel& one) { return !one.used; });
  piece.ticket = static_cast<int>(free - at_kernel_.begin());
  *free = {.used = true,
           .kind = piece.kind,
           .target = piece.target,
           .offset_bytes = piece.file_offset(),
           .length_bytes = piece.left(),
           .since = clock_()};
}

void PieceQueue::answered(Piece& piece) {
  const MutexLock lock(mutex_);
  at_kernel_[static_cast<size_t>(std::exchange(piece.ticket, -1))].used = false;
  last_answer_ = clock_();
}

const PieceQueue::AtKernel* PieceQueue::longest_at_kernel() const {
  const AtKernel* longest = nullptr;
  for (const AtKernel& one : at_kernel_) {
    if (one.used && (longest == nullptr || one.since < longest->since)) longest = &one;
  }
  return longest;
}

std::optional<std::chrono::nanoseconds> PieceQueue::silent_since() {
  const MutexLock lock(mutex_);
  const AtKernel* longest = given_up_ ? nullptr : longest_at_kernel();  // a broken ring never answers
  return longest == nullptr ? std::nullopt : std::optional(std::max(last_answer_, longest->since));
}

std::optional<Unanswered> PieceQueue::unanswered() {
  AtKernel longest;
  int64_t requests = 0;
  {
    const MutexLock lock(mutex_);
    const AtKernel* found = longest_at_kernel();
    if (found == nullptr) return std::nullopt;
    longest = *found;
    requests = std::ranges::count_if(at_kernel_, [](const AtKernel& one) { return one.used; });
  }
  return Unanswered{.operation = longest.kind == Transfer::Kind::write ? Operation::write : Operation::read,
                    .file = owner_.path_of(longest.target),
                    .offset_bytes = longest.offset_bytes,
                    .length_bytes = longest.length_bytes,
                    .requests = requests};
}

void PieceQueue::give_up(const Error& why) {
  {
    const MutexLock lock(mutex_);
    if (given_up_) return;
    given_up_ = why;
    ++calls_;
  }
  quiet_.notify_all();
  tell_given_up();
}

bool PieceQueue::is_given_up() {
  const MutexLock lock(mutex_);
  return given_up_.has_value();
}

void PieceQueue::fail_all() {
  while (Transfer* over = next_to_fail()) complete(*over);
}

Transfer* PieceQueue::next_to_fail() {
  const MutexLock lock(mutex_);
  if (!given_up_) return nullptr;
  while (looking_ != 0) quiet_.wait(mutex_);
  append_due();
  for (const Waiting& one : std::exchange(waiting_, {})) --one.piece.active->pieces;
  for (Fifo& fifo : fifos_) fifo.current = nullptr;
  const auto begun =
      std::ranges::find_if(actives_, [](const Active& active) { return active.transfer != nullptr; });
  Transfer* over = nullptr;
  if (begun != actives_.end()) {
    over = std::exchange(begun->transfer, nullptr);
    let_go(*begun);
  } else {
    const auto fifo = std::ranges::find_if(fifos_, [](const Fifo& one) { return one.first != nullptr; });
    if (fifo == fifos_.end()) return nullptr;
    over = std::exchange(fifo->first, fifo->first->next);
    if (fifo->first == nullptr) fifo->last = nullptr;
    meter_.started(*over);
  }
  over->error = given_up_;
  meter_.completed(*over);
  ++calls_;
  return over;
}

/// Of a queue that was given up: nobody waits for it, and the kernel has nothing of it.
void PieceQueue::let_go(Active& active) {
  if (active.transfer == nullptr && active.pieces == 0) free_.push_back(&active);
}

bool PieceQueue::kernel_keeps_memory() {
  const MutexLock lock(mutex_);
  return given_up_ && std::ranges::any_of(actives_, [](const Active& active) { return active.pieces > 0; });
}

PieceQueue::Looking::Looking(PieceQueue& queue) : queue_(queue) {
  const MutexLock lock(queue.mutex_);
  allowed_ = !queue.given_up_;
  queue.looking_ += allowed_ ? 1 : 0;
}

PieceQueue::Looking::~Looking() {
  const MutexLock lock(queue_.mutex_);
  if (allowed_ && --queue_.looking_ == 0) queue_.quiet_.notify_all();
}

void PieceQueue::threads_begin(int threads) {
  const MutexLock lock(mutex_);
  threads_ += threads;
}

void PieceQueue::thread_ends() {
  const MutexLock lock(mutex_);
  --threads_;
  quiet_.notify_all();
}

bool PieceQueue::wait_for_threads() {
  const MutexLock lock(mutex_);
  while (calls_ != 0 || (threads_ != 0 && (!given_up_ || looking_ != 0))) quiet_.wait(mutex_);
  return threads_ == 0;
}

}  // namespace overspill::io
