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
}

void PieceQueue::push(Transfer& transfer) {
  transfer.next = nullptr;
  {
    const std::lock_guard lock(mutex_);
    meter_.pushed(transfer);
    Fifo& fifo = fifos_[static_cast<size_t>(transfer.priority)];
    (fifo.last == nullptr ? fifo.first : fifo.last->next) = &transfer;
    fifo.last = &transfer;
  }
  work_.notify_one();
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
      const std::lock_guard lock(mutex_);
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
    if (over != nullptr) owner_.completed(*over);
    if (got_piece) return true;
  }
}

/// Once the queue is stopped nothing waits any more.
std::vector<PieceQueue::Waiting>::iterator PieceQueue::first_due(Transfer::Priority from) {
  if (waiting_.empty()) return waiting_.end();
  const auto now = clock_();
  return std::ranges::find_if(waiting_, [&](const Waiting& one) {
    return one.piece.active->transfer->priority >= from && (stopped_ || one.due <= now);
  });
}

std::chrono::nanoseconds PieceQueue::earliest_due() const {
  return std::ranges::min(waiting_, {}, &Waiting::due).due;
}

std::optional<std::chrono::nanoseconds> PieceQueue::next_try_in() {
  const std::lock_guard lock(mutex_);
  if (waiting_.empty()) return std::nullopt;
  return std::max(std::chrono::nanoseconds(0), earliest_due() - clock_());
}

PieceQueue::Fifo* PieceQueue::first_pending(Transfer::Priority from) {
  if (std::ssize(waiting_) >= depth_) return nullptr;
  const auto found =
      std::find_if(fifos_.begin() + static_cast<ptrdiff_t>(from), fifos_.end(),
                   [](const Fifo& fifo) { return fifo.first != nullptr || fifo.current != nullptr; });
  return found == fifos_.end() ? nullptr : &*found;
}

bool PieceQueue::has_urgent_work() {
  const std::lock_guard lock(mutex_);
  if (first_due(Transfer::Priority::demand) != waiting_.end()) return true;
  const Fifo* fifo = first_pending(Transfer::Priority::demand);
  return fifo != nullptr && fifo != &fifos_[static_cast<size_t>(Transfer::Priority::write_behind)];
}

bool PieceQueue::has_work() {
  const std::lock_guard lock(mutex_);
  return pending();
}

bool PieceQueue::wait() {
  std::unique_lock lock(mutex_);
  while (!stopped_ && !pending()) {
    if (waiting_.empty()) {
      work_.wait(lock);
    } else {
      work_.wait_for(lock, earliest_due() - clock_());
    }
  }
  return pending();
}

void PieceQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
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

Transfer* PieceQueue::retire(Active& active) {
  Transfer* transfer = std::exchange(active.transfer, nullptr);
  transfer->error = std::move(active.error);
  active.error.reset();
  meter_.completed(*transfer);
  free_.push_back(&active);
  return transfer;
}

bool PieceQueue::settle(Piece& piece, int64_t result) {
  if (hook_) result = hook_(piece.writes(), piece.file_offset(), piece.left(), result);
  if (result < 0) return settle_error(piece, static_cast<int>(-result));
  if (result > piece.left()) {
    finish(piece, failure(piece, ErrorKind::device, 0, fmt::format("the kernel reports {} bytes", result)));
    return true;
  }
  // O_DIRECT goes on at a block boundary only.
  const int64_t progress = result / kBlockBytes * kBlockBytes;
  piece.done += progress;
  if (piece.left() == 0) {
    std::optional<Error> error = piece.writes() ? std::nullopt : verify(piece);
    if (error && read_again(piece, *error)) return true;
    finish(piece, std::move(error));
    return true;
  }
  if (progress == 0 && !piece.writes()) {  // slabs end at a block boundary, so this is the end of the file
    finish(piece, failure(piece, ErrorKind::truncated, 0,
                          fmt::format("{} bytes are missing", piece.left() - result)));
    return true;
  }
  piece.fruitless = progress > 0 ? 0 : piece.fruitless + 1;
  if (piece.fruitless > kFruitlessMax) {
    finish(piece, failure(piece, ErrorKind::device, 0, "the kernel writes nothing and gives no reason"));
    return true;
  }
  count(at_once_);
  return false;
}

bool PieceQueue::settle_error(Piece& piece, int os_error) {
  if (os_error == EINTR && ++piece.fruitless <= kFruitlessMax) {
    count(at_once_);
    return false;
  }
  Error error = failure(piece, kind_of_errno(os_error), os_error, "");
  if (may_pass(os_error, piece.writes()) &&
      try_later(piece, error, is_shortage(os_error) ? shortages_ : reads_))
    return true;
  if (piece.retries > 0) error.detail = fmt::format("it was tried {} times", piece.retries + 1);
  finish(piece, std::move(error));
  return true;
}

/// Bits may flip on the way from a disk that has the right ones: what differs from its checksum is read a
/// second time, and no third.
bool PieceQueue::read_again(Piece& piece, const Error& why) {
  if (std::exchange(piece.reread, true)) return false;
  piece.done = 0;
  return try_later(piece, why, checksums_);
}

/// Keeps the piece until its wait is over; false where it was tried often enough, or its transfer has failed.
bool PieceQueue::try_later(Piece& piece, const Error& why, std::atomic<int64_t>& counter) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_ || piece.active->error || piece.retries >= retry_.tries_max) return false;
    ++piece.retries;
    meter_.returned(piece.active->transfer->kind, 0);
    waiting_.push_back({piece, clock_() + retry_.wait_before(piece.retries)});
  }
  piece.active = nullptr;
  count(counter);
  work_.notify_all();  // whoever waits for work waits no longer than until then
  if (!has_retried_.exchange(true)) owner_.first_retry(why);
  return true;
}

RetryStats PieceQueue::retries() const {
  const auto now = [](const std::atomic<int64_t>& of) { return of.load(std::memory_order_relaxed); };
  return {now(at_once_), now(reads_), now(shortages_), now(checksums_)};
}

void PieceQueue::finish(Piece& piece, std::optional<Error> error) {
  Transfer* over = nullptr;
  {
    const std::lock_guard lock(mutex_);
    Active& active = *piece.active;
    meter_.returned(active.transfer->kind, error ? 0 : piece.bytes);
    if (error && !active.error) active.error = std::move(error);
    --active.pieces;
    // A current transfer is retired by advance(), which also drops what is left of it after an error.
    const bool current =
        std::any_of(fifos_.begin(), fifos_.end(), [&](Fifo& fifo) { return fifo.current == &active; });
    if (active.pieces == 0 && !current) over = retire(active);
  }
  piece.active = nullptr;
  if (over != nullptr) owner_.completed(*over);
}

Error PieceQueue::failure(const Piece& piece, ErrorKind kind, int os_error, std::string detail) const {
  return {.kind = kind,
          .operation = piece.writes() ? Operation::write : Operation::read,
          .os_error = os_error,
          .path = owner_.path_of(piece.active->target),
          .offset_bytes = piece.file_offset(),
          .length_bytes = piece.left(),
          .detail = std::move(detail)};
}

// The piece's part of its extent's checksums.
std::span<uint64_t> PieceQueue::sums_of(const Piece& piece, std::span<uint64_t> extent_sums) {
  return extent_sums.subspan(static_cast<size_t>(piece.offset / kChecksumBlockBytes),
                             static_cast<size_t>(checksum_blocks(piece.bytes)));
}

void PieceQueue::checksum(const Piece& piece) const {
  const Transfer& transfer = *piece.active->transfer;
  const auto sums = sums_of(piece, piece.active->target.sums);
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
  const auto sums = sums_of(piece, piece.active->target.sums);
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
    return corrupt(owner_.path_of(piece.active->target),
                   transfer.extent.offset + piece.offset + i * kChecksumBlockBytes,
                   static_cast<int64_t>(block.size()), expected, found);
  }
  return std::nullopt;
}

}  // namespace overspill::io
