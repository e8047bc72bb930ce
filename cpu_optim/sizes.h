// Size checks of the front ends.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace overspill::optim {

/// Throws std::invalid_argument naming the array unless it has as many elements as the one it goes with.
inline void check_size(const char* function, const char* array, size_t actual, size_t expected) {
  if (actual == expected) return;
  throw std::invalid_argument(std::string(function) + ": " + array + " has " + std::to_string(actual) +
                              " elements, expected " + std::to_string(expected));
}

}  // namespace overspill::optim
