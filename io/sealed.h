// Bytes that travel between the store and memory together with their checksums, for code that processes every
// block anyway. It compares a block right before it uses it, and checksums it right after it changes it. So
// each byte is read from memory once instead of three times (docs/store.md).
//
//   read:   sealed.expect(transfer), submit; then open() block by block.
//   write:  seal() each block that open() gave, as soon as its new bytes are there;
//   sealed.hand_over(transfer),
//           submit.
//
// Unverified bytes can neither be read nor written back: only open() gives access to the memory, and
// hand_over() refuses an extent unless every block was opened and sealed.
#pragma once

#include <cstdint>
#include <vector>

#include "io/store.h"

namespace overspill::io {

/// The content of one extent. Only the constructor allocates. Threads: one at a time; between submit() and
/// on_complete only the store may use it.
class Sealed {
 public:
  /// `bytes_max`: of the largest extent.
  explicit Sealed(int64_t bytes_max);

  /// Before a read of transfer.extent into transfer.memory is submitted.
  void expect(Transfer& transfer);
  /// In place of a read: `memory` already holds the content, which is to be sealed for a write.
  void start(std::byte* memory, int64_t bytes);

  /// Bytes begin <= i < end, compared with their checksums; called over ascending ranges. `begin` is a
  /// multiple of kChecksumBlockBytes, `end` too or the extent's. What differs is read a second time, from
  /// `store`, which is the one that it was read from; this waits for it. Throws StoreError{corrupt} that
  /// names file, offset and length of the block.
  std::byte* open(Store& store, int64_t begin, int64_t end);

  /// The same range again: its bytes are final.
  void seal(int64_t begin, int64_t end);

  /// Before a write to transfer.extent is submitted: sets its memory and checksums. Throws std::logic_error
  /// unless every block was opened and sealed, in an extent of this length.
  void hand_over(Transfer& transfer);

  int64_t bytes() const { return extent_.bytes; }

 private:
  std::span<const std::byte> block(int64_t index) const;
  void read_again(Store& store, int64_t index);
  std::span<uint64_t> sums();

  Extent extent_;  // where it was read; of start() only the length
  std::byte* memory_ = nullptr;
  bool compares_ = false;
  int64_t opened_ = 0;  // blocks from the first
  int64_t sealed_ = 0;
  std::vector<uint64_t> sums_;
};

}  // namespace overspill::io
