// What backends have in common when they start a kernel: what is refused, and arrays by their types.
#pragma once

#include <string>
#include <type_traits>

#include "cpu_optim/elements.h"
#include "kernels/device_kernels.h"

namespace overspill::kernels {

/// Throws DeviceError where a gradient of one type does not go into one of the other.
inline void check_taken_in(optim::Element from, optim::Element to) {
  if (from != to && to != optim::Element::fp32)
    throw DeviceError("take_in: a gradient goes into one of its own type or of fp32");
}

/// Calls use(from, to) with arrays of a pair of types that check_taken_in() allows.
template <class Use>
void with_taken_in(optim::Element from_type, const void* from, optim::Element to_type, void* to, Use use) {
  optim::with_type(from_type, [&]<class From>(From) {
    optim::with_type(to_type, [&]<class To>(To) {
      if constexpr (std::is_same_v<From, To> || std::is_same_v<To, float>)
        use(static_cast<const From*>(from), static_cast<To*>(to));
    });
  });
}

inline void check_known(const DeviceKernels& kernels, optim::Format format) {
  if (!kernels.formats()[static_cast<size_t>(format)])
    throw DeviceError("update: these kernels do not know the format " + std::string(optim::name(format)));
}

}  // namespace overspill::kernels
