// What backends have in common when they start a kernel: what is refused, arrays by their types, and which
// update it is.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "cpu_optim/elements.h"
#include "cpu_optim/optimizer.h"
#include "kernels/device_kernels.h"
#include "kernels/update_block.h"
#include "kernels/update_element.h"

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

/// A format of which one element is updated by itself, as types.
template <class W, class S>
struct Held {
  using Weights = W;
  using States = S;
};

/// Calls use(Held()) for the format of an optimizer of so many states.
template <int kStates, class Use>
void with_held(optim::Format format, Use use) {
  switch (format) {
    case optim::Format::fp32:
      return use(Held<Fp32Weights, Fp32States<kStates>>());
    case optim::Format::exact:
      return use(Held<SplitWeights, Fp32States<kStates>>());
    case optim::Format::fp16:
      return use(Held<Fp16Weights, Fp32States<kStates>>());
    case optim::Format::compact:
      return use(Held<SplitWeights, Bf16States<kStates>>());
    case optim::Format::eight_bit:
      break;
  }
  throw std::logic_error("in 8 bits no element is updated by itself");
}

/// The kernel of an optimizer in a format: calls by_element(UpdateElement()), or by_block(UpdateBlock()) in 8
/// bits.
template <class ByElement, class ByBlock>
void with_update(optim::Optimizer optimizer, optim::Format format, optim::Element gradient,
                 const optim::Pass& pass, ByElement by_element, ByBlock by_block) {
  optim::Optimizers::for_each([&]<class T>(int i) {
    if (i != static_cast<int>(optimizer)) return;
    optim::with_type(gradient, [&]<class G>(G) {
      if (format == optim::Format::eight_bit) return by_block(UpdateBlock<T, G>(pass));
      with_held<T::kStateCount>(format, [&]<class H>(H) {
        by_element(UpdateElement<T, typename H::Weights, typename H::States, G>(pass));
      });
    });
  });
}

/// Blocks of kScaleBlock elements that a pass touches: first, and behind the last.
inline std::pair<int64_t, int64_t> blocks_of(const optim::Pass& pass) {
  return {pass.begin / optim::kScaleBlock, (pass.end + optim::kScaleBlock - 1) / optim::kScaleBlock};
}

}  // namespace overspill::kernels
