// Tensors whose order in memory is not row-major: channels_last convolutions, transposed matrices.
//
// Worked example: shape (2, 3) with strides (1, 2) lies in memory as the rows of its transpose; memory
// elements 0..5 are row-major elements 0, 3, 1, 4, 2, 5.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace overspill::engine {

/// The canonical form of `strides` (in elements, one per dimension): empty where the tensor lies row-major, 1
/// for dimensions of extent 1, whose strides address nothing. std::nullopt unless every element of the tensor
/// has a place of its own and no place is left over. `strides` may be empty; both arguments may be untrusted
/// input.
std::optional<std::vector<int64_t>> normal_strides(std::span<const int64_t> shape,
                                                   std::span<const int64_t> strides);

/// Copies a tensor from memory order to row-major order, piece by piece.
class RowMajor {
 public:
  /// `strides` in the form of normal_strides, not empty.
  RowMajor(std::span<const int64_t> shape, std::span<const int64_t> strides);

  /// `elements` are the next ones in memory order, of 1, 2, 4 or 8 bytes each; they go to their places in
  /// `tensor`, which has all of them. Throws std::invalid_argument for more elements than it has.
  void place(std::span<const std::byte> elements, int64_t element_bytes, std::span<std::byte> tensor);

 private:
  struct Dimension {
    int64_t extent = 0;
    int64_t stride = 0;  // row-major
    int64_t index = 0;   // of the next element
  };

  template <typename Element>
  void place_as(std::span<const std::byte> elements, std::span<std::byte> tensor);
  void advance_outer();

  std::vector<Dimension> dimensions_;  // as they lie in memory, the innermost first
  int64_t offset_ = 0;                 // of the next element, row-major
  int64_t left_ = 1;
};

}  // namespace overspill::engine
