// Arrays by the type of their elements, which is known at run time only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "cpu_optim/format.h"
#include "cpu_optim/gradient.h"

namespace overspill::optim {

template <class T>
std::span<T> span_of(std::byte* data, int64_t elements) {
  return {reinterpret_cast<T*>(data), static_cast<size_t>(elements)};
}

template <class T>
std::span<const T> span_of(const void* data, int64_t elements) {
  return {static_cast<const T*>(data), static_cast<size_t>(elements)};
}

/// Calls use(T()) with the type of an element.
template <class Use>
auto with_type(Element element, Use use) {
  switch (element) {
    case Element::bf16:
      return use(uint16_t());
    case Element::fp16:
      return use(Fp16());
    case Element::fp32:
      break;
  }
  return use(float());
}

/// to = from or to += from, as fp32.
inline void widen(Element element, const std::byte* from, std::span<float> to, bool first) {
  const auto elements = static_cast<int64_t>(to.size());
  with_type(element, [&]<class T>(T) {
    if (!first) return accumulate(span_of<T>(from, elements), to);
    if constexpr (std::is_same_v<T, float>) {
      std::ranges::copy(span_of<float>(from, elements), to.begin());
    } else {
      widen(span_of<T>(from, elements), to);
    }
  });
}

/// The sum of the squares of an array, and whether all of it is finite (gradient.h).
inline Squares squares_of(const std::byte* data, int64_t elements, Element element) {
  return with_type(element, [&]<class T>(T) { return squares(span_of<T>(data, elements)); });
}

/// to += from, both of one type, in its own width (gradient.h).
inline void accumulate(Element element, const void* from, std::byte* to, int64_t elements) {
  with_type(element, [&]<class T>(T) { accumulate(span_of<T>(from, elements), span_of<T>(to, elements)); });
}

/// fp32 back to what is kept.
inline void narrow(Element element, std::span<const float> from, std::byte* to) {
  with_type(element, [&]<class T>(T) {
    const auto out = span_of<T>(to, static_cast<int64_t>(from.size()));
    if constexpr (std::is_same_v<T, float>) {
      std::ranges::copy(from, out.begin());
    } else {
      narrow(from, out);
    }
  });
}

}  // namespace overspill::optim
