#include "kernels/update_element.h"

#include "kernels/device_kernels.h"

namespace overspill::kernels {

Formats known_formats() {
  Formats known;
  for (int f = 0; f < optim::kFormatCount; ++f) {
    const auto nothing = [](auto) {};
    known[static_cast<size_t>(f)] = with_held<0>(optim::Format{static_cast<uint8_t>(f)}, nothing);
  }
  return known;
}

}  // namespace overspill::kernels
