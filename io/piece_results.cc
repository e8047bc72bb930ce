// What a queue makes of the kernel's results (piece_queue.h): over, again, or again later; and checksums.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/checksum.h"
#include "io/piece_queue.h"

namespace overspill::io {
namespace {

// A kernel that says EINTR or moves nothing this often in a row will not do better the next time.
constexpr int kFruitlessMax = 1000;

}  // namespace

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
