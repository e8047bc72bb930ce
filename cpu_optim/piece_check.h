// Checks of the front ends that work on pieces.
#pragma once

#include <stdexcept>
#include <string>

#include "cpu_optim/update.h"

namespace overspill::optim {

/// Throws std::invalid_argument unless the piece has the components of the format and the range lies in it.
inline void check_piece(const char* function, Optimizer optimizer, Format format, const Piece& piece,
                        Range range) {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(std::string(function) + ": " + what);
  };
  const size_t expected = components(optimizer, format).size();
  if (piece.components.size() != expected) {
    fail("the piece has " + std::to_string(piece.components.size()) + " components; " +
         std::string(name(optimizer)) + " in " + std::string(name(format)) + " has " +
         std::to_string(expected));
  }
  if (range.begin < 0 || range.begin > range.end || range.end > piece.elements) {
    fail("the range " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
         " is not in a piece of " + std::to_string(piece.elements) + " elements");
  }
  if (piece.index < 0) fail("the piece's index is " + std::to_string(piece.index));
  if (format == Format::eight_bit && piece.index % kScaleBlock != 0) {
    fail("the piece's index is " + std::to_string(piece.index) + ", no multiple of " +
         std::to_string(kScaleBlock));
  }
  for (size_t i = 0; i < expected; ++i) {
    if (piece.components[i] == nullptr && range.begin < range.end) {
      fail("component " + std::string(components(optimizer, format)[i].name) + " has no memory");
    }
  }
}

}  // namespace overspill::optim
