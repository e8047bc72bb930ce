#include "io/piece_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/checksum.h"

namespace overspill::io {
namespace {

// A kernel that says EINTR or moves nothing this often in a row will not do better the next time.
constexpr int kFruitlessMax = 1000;

void count(std::atomic<int64_t>& one) {
  one.fetch_add(1, std::memory_order_relaxed);
}

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

// ---- results

bool PieceQueue::settle(Piece& piece, int64_t result) {
  Verdict verdict;
  {
    const Looking look(*this);
    if (look.allowed() && hook_) result = hook_(piece.writes(), piece.file_offset(), piece.left(), result);
    if (look.allowed()) verdict = judge(piece, result);
  }
  if (verdict.what == Verdict::What::at_once) {
    count(at_once_);
    return false;
  }
  if (verdict.what == Verdict::What::later) {
    if (try_later(piece, *verdict.error, *verdict.counter)) return true;
    if (piece.retries > 0 && verdict.error->kind != ErrorKind::corrupt)
      verdict.error->detail = fmt::format("it was tried {} times", piece.retries + 1);
  }
  finish(piece, std::move(verdict.error));
  return true;
}

PieceQueue::Verdict PieceQueue::judge(Piece& piece, int64_t result) {
  using What = Verdict::What;
  if (result < 0) return judge_error(piece, static_cast<int>(-result));
  if (result > piece.left())
    return {What::over,
            failure(piece, ErrorKind::device, 0, fmt::format("the kernel reports {} bytes", result))};
  // O_DIRECT goes on at a block boundary only.
  const int64_t progress = result / kBlockBytes * kBlockBytes;
  piece.done += progress;
  if (piece.left() == 0) {
    std::optional<Error> error = piece.writes() ? std::nullopt : verify(piece);
    // Bits may flip on the way from a disk that has the right ones: what differs from its checksum is read a
    // second time, and no third.
    if (!error || std::exchange(piece.reread, true)) return {What::over, std::move(error)};
    piece.done = 0;
    return {What::later, std::move(error), &checksums_};
  }
  if (progress == 0 && !piece.writes()) {  // slabs end at a block boundary, so this is the end of the file
    return {What::over, failure(piece, ErrorKind::truncated, 0,
                                fmt::format("{} bytes are missing", piece.left() - result))};
  }
  piece.fruitless = progress > 0 ? 0 : piece.fruitless + 1;
  if (piece.fruitless > kFruitlessMax) {
    return {What::over,
            failure(piece, ErrorKind::device, 0, "the kernel writes nothing and gives no reason")};
  }
  return {What::at_once};
}

PieceQueue::Verdict PieceQueue::judge_error(Piece& piece, int os_error) {
  using What = Verdict::What;
  if (os_error == EINTR && ++piece.fruitless <= kFruitlessMax) return {What::at_once};
  Error error = failure(piece, kind_of_errno(os_error), os_error, "");
  if (!may_pass(os_error, piece.writes())) return {What::over, std::move(error)};
  return {What::later, std::move(error), is_shortage(os_error) ? &shortages_ : &reads_};
}

/// Keeps the piece until its wait is over; false where it was tried often enough, or its transfer has failed.
bool PieceQueue::try_later(Piece& piece, const Error& why, std::atomic<int64_t>& counter) {
  bool first = false;
  {
    const MutexLock lock(mutex_);
    if (stopped_ || given_up_ || piece.active->error || piece.retries >= retry_.tries_max) return false;
    ++piece.retries;
    meter_.returned(piece.active->transfer->kind, 0);
    waiting_.push_back({piece, clock_() + retry_.wait_before(piece.retries)});
    first = !std::exchange(has_retried_, true);
    if (first) ++calls_;
  }
  piece.active = nullptr;
  count(counter);
  work_.notify_all();  // whoever waits for work waits no longer than until then
  if (first) {
    owner_.first_retry(why);
    call_ends();
  }
  return true;
}

RetryStats PieceQueue::retries() const {
  const auto now = [](const std::atomic<int64_t>& of) { return of.load(std::memory_order_relaxed); };
  return {.at_once = now(at_once_),
          .reads = now(reads_),
          .writes = now(writes_),
          .shortages = now(shortages_),
          .checksums = now(checksums_)};
}

void PieceQueue::finish(Piece& piece, std::optional<Error> error) {
  Transfer* over = nullptr;
  {
    const MutexLock lock(mutex_);
    Active& active = *piece.active;
    if (given_up_) {
      --active.pieces;
      let_go(active);
      return;
    }
    meter_.returned(piece.kind, error ? 0 : piece.bytes);
    if (error && !active.error) active.error = std::move(error);
    --active.pieces;
    // A current transfer is retired by advance(), which also drops what is left of it after an error.
    const bool current =
        std::any_of(fifos_.begin(), fifos_.end(), [&](Fifo& fifo) { return fifo.current == &active; });
    if (active.pieces == 0 && !current) over = retire(active);
  }
  piece.active = nullptr;
  if (over != nullptr) complete(*over);
}

Error PieceQueue::failure(const Piece& piece, ErrorKind kind, int os_error, std::string detail) const {
  return {.kind = kind,
          .operation = piece.writes() ? Operation::write : Operation::read,
          .os_error = os_error,
          .path = owner_.path_of(piece.target),
          .offset_bytes = piece.file_offset(),
          .length_bytes = piece.left(),
          .detail = std::move(detail)};
}

// The piece's part of its extent's checksums.
std::span<uint64_t> PieceQueue::sums_of(const Piece& piece, std::span<uint64_t> extent_sums) {
  return extent_sums.subspan(static_cast<size_t>(piece.offset / kChecksumBlockBytes),
                             static_cast<size_t>(checksum_blocks(piece.bytes)));
}

void PieceQueue::checksum(const Piece& piece) {
  const Looking look(*this);
  if (look.allowed()) compute_checksums(piece);
}

void PieceQueue::compute_checksums(const Piece& piece) const {
  const Transfer& transfer = *piece.active->transfer;
  const auto sums = sums_of(piece, piece.target.sums);
  if (transfer.check == Transfer::Check::by_caller) {
    std::ranges::copy(sums_of(piece, transfer.checksums), sums.begin());
    return;
  }
  const std::span<const std::byte> bytes(transfer.memory + piece.offset, static_cast<size_t>(piece.bytes));
  for (int64_t i = 0; i < checksum_blocks(piece.bytes); ++i) {
    sums[static_cast<size_t>(i)] = checksum_block(checksummed_block(bytes, i));
  }
}

std::optional<Error> PieceQueue::verify(const Piece& piece) const {
  const Transfer& transfer = *piece.active->transfer;
  const auto sums = sums_of(piece, piece.target.sums);
  if (transfer.check == Transfer::Check::by_caller) {
    std::ranges::copy(sums, sums_of(piece, transfer.checksums).begin());
    return std::nullopt;
  }
  const std::span<const std::byte> bytes(transfer.memory + piece.offset, static_cast<size_t>(piece.bytes));
  for (int64_t i = 0; i < checksum_blocks(piece.bytes); ++i) {
    const auto block = checksummed_block(bytes, i);
    const uint64_t expected = sums[static_cast<size_t>(i)];
    const uint64_t found = checksum_block(block);
    if (expected == found) continue;
    return corrupt(owner_.path_of(piece.target),
                   transfer.extent.offset + piece.offset + i * kChecksumBlockBytes,
                   static_cast<int64_t>(block.size()), expected, found);
  }
  return std::nullopt;
}

}  // namespace overspill::io
