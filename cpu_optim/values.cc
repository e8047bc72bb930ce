#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "cpu_optim/gradient.h"
#include "cpu_optim/piece_check.h"
#include "cpu_optim/sizes.h"
#include "cpu_optim/split.h"
#include "cpu_optim/update.h"

namespace overspill::optim {
namespace {

uint32_t bits_of(float x) {
  return std::bit_cast<uint32_t>(x);
}

void check_range(const char* function, Optimizer optimizer, Format format, const Piece& piece, Range range,
                 size_t values) {
  check_piece(function, optimizer, format, piece, range);
  check_size(function, "values", values, static_cast<size_t>(range.end - range.begin));
}

/// The component that holds a state, or the message of a caller's mistake.
size_t component_of(const char* function, Optimizer optimizer, Format format, int state) {
  const auto specs = components(optimizer, format);
  for (size_t i = 0; i < specs.size(); ++i) {
    if (state >= 0 && specs[i].state == state) return i;
  }
  throw std::invalid_argument(std::string(function) + ": " + std::string(name(optimizer)) + " has no state " +
                              std::to_string(state));
}

Values values_of(Optimizer optimizer, int state) {
  Values values = Values::any;
  Optimizers::for_each([&]<class T>(int i) {
    if (i == static_cast<int>(optimizer)) values = T::kStates[state].values;
  });
  return values;
}

template <class T>
std::span<T> elements(const Piece& piece, size_t component, Range range) {
  return {reinterpret_cast<T*>(piece.components[component]) + range.begin,
          static_cast<size_t>(range.end - range.begin)};
}

// ---- the codes of 8 bits, one at a time: formats.inl says what they are

struct Coder {
  bool is_signed;

  int segments() const { return is_signed ? 8 : 16; }
  int magnitudes() const { return is_signed ? 128 : 256; }
  float largest() const { return std::ldexp(1.9375f, segments() - 1) - 1; }

  uint8_t exponent(std::span<const float> block) const {
    float absolute = 0;
    for (const float x : block) {
      if (!std::isfinite(x)) return 255;
      absolute = std::max(absolute, std::abs(x));
    }
    int exponent = 1;
    while (largest() * scale(static_cast<uint8_t>(exponent)) < absolute) ++exponent;
    return static_cast<uint8_t>(exponent);
  }
  /// The exponent for values that may come from decoded codes, so that encoding gives the same codes again.
  /// When the block was encoded, its largest value may have been rounded down. The decoded values then fit a
  /// scale that is smaller by one step, but are not multiples of it. So where the smallest scale that fits
  /// does not represent all values exactly, and the next larger one does, that one is taken.
  uint8_t exponent_of_codes(std::span<const float> block) const {
    const uint8_t least = exponent(block);
    const bool theirs = least < 254 && !exact(block, least) && exact(block, static_cast<uint8_t>(least + 1));
    return static_cast<uint8_t>(least + (theirs ? 1 : 0));
  }
  static float scale(uint8_t exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23); }

  float decode(uint8_t code, uint8_t exponent) const {
    const auto magnitude = static_cast<uint32_t>(code % magnitudes());
    const float w = std::bit_cast<float>((magnitude << 19) + bits_of(1.0f));
    const float x = std::fma(w, scale(exponent), -scale(exponent));
    return code >= magnitudes() ? -x : x;
  }
  bool exact(std::span<const float> block, uint8_t exponent) const {
    return std::all_of(block.begin(), block.end(),
                       [&](float x) { return decode(encode(x, exponent), exponent) == x; });
  }
  uint8_t encode(float x, uint8_t exponent) const {
    if (exponent == 255) return 0;
    const float w = std::abs(x) / scale(exponent) + 1;
    auto code = (bits_of(w) - bits_of(1.0f) + (1u << 18)) >> 19;  // the nearest
    if (is_signed) return static_cast<uint8_t>(code + (std::signbit(x) ? 128 : 0));
    return static_cast<uint8_t>(x != 0 ? std::max(code, 1u) : code);
  }
};

}  // namespace

void load_weights(Optimizer optimizer, Format format, const Piece& piece, Range range,
                  std::span<float> values) {
  check_range("load_weights", optimizer, format, piece, range, values.size());
  if (format == Format::fp32 || format == Format::fp16) {
    const auto from = elements<const float>(piece, format == Format::fp32 ? 0 : 1, range);
    std::copy(from.begin(), from.end(), values.begin());
    return;
  }
  const auto hi = elements<const uint16_t>(piece, 0, range);
  for (size_t i = 0; i < values.size(); ++i) {
    const int lo = format == Format::eight_bit ? elements<const int8_t>(piece, 1, range)[i] * 256
                                               : elements<const int16_t>(piece, 1, range)[i];
    values[i] = std::bit_cast<float>(join_split(hi[i], static_cast<int16_t>(lo)));
  }
}

void store_weights(Optimizer optimizer, Format format, const Piece& piece, Range range,
                   std::span<const float> values) {
  check_range("store_weights", optimizer, format, piece, range, values.size());
  if (format == Format::fp32 || format == Format::fp16) {
    const auto to = elements<float>(piece, format == Format::fp32 ? 0 : 1, range);
    std::copy(values.begin(), values.end(), to.begin());
    if (format == Format::fp16) narrow(values, elements<Fp16>(piece, 0, range));
    return;
  }
  const auto hi = elements<uint16_t>(piece, 0, range);
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = bits_of(values[i]);
    if (format == Format::eight_bit) {
      bits = std::isnan(values[i]) ? 0x7FC00000u : (bits + 0x80u) & ~0xFFu;
      elements<int8_t>(piece, 1, range)[i] = static_cast<int8_t>(split_lo(bits) / 256);
    } else {
      elements<int16_t>(piece, 1, range)[i] = split_lo(bits);
    }
    hi[i] = split_hi(bits);
  }
}

void load_state(Optimizer optimizer, Format format, const Piece& piece, Range range, int state,
                std::span<float> values) {
  check_range("load_state", optimizer, format, piece, range, values.size());
  const size_t i = component_of("load_state", optimizer, format, state);
  if (format == Format::compact) return widen(elements<const uint16_t>(piece, i, range), values);
  if (format != Format::eight_bit) {
    const auto from = elements<const float>(piece, i, range);
    std::copy(from.begin(), from.end(), values.begin());
    return;
  }
  const Coder coder{values_of(optimizer, state) == Values::any};
  const auto* codes = reinterpret_cast<const uint8_t*>(piece.components[i]);
  for (int64_t at = range.begin; at < range.end; ++at) {
    values[static_cast<size_t>(at - range.begin)] =
        coder.decode(codes[at], codes[piece.elements + at / kScaleBlock]);
  }
}

void store_state(Optimizer optimizer, Format format, const Piece& piece, Range range, int state,
                 std::span<const float> values) {
  check_range("store_state", optimizer, format, piece, range, values.size());
  const size_t i = component_of("store_state", optimizer, format, state);
  if (format == Format::compact) return narrow(values, elements<uint16_t>(piece, i, range));
  if (format != Format::eight_bit) {
    std::copy(values.begin(), values.end(), elements<float>(piece, i, range).begin());
    return;
  }
  if (range.begin % kScaleBlock != 0 || (range.end % kScaleBlock != 0 && range.end != piece.elements)) {
    throw std::invalid_argument("store_state: the range " + std::to_string(range.begin) + " to " +
                                std::to_string(range.end) + " cuts a block of " +
                                std::to_string(kScaleBlock) + " elements");
  }
  const Coder coder{values_of(optimizer, state) == Values::any};
  auto* codes = reinterpret_cast<uint8_t*>(piece.components[i]);
  for (int64_t at = range.begin; at < range.end; at += kScaleBlock) {
    const auto count = static_cast<size_t>(std::min(kScaleBlock, range.end - at));
    const auto block = values.subspan(static_cast<size_t>(at - range.begin), count);
    const uint8_t exponent = coder.exponent_of_codes(block);
    codes[piece.elements + at / kScaleBlock] = exponent;
    for (size_t k = 0; k < count; ++k) codes[at + static_cast<int64_t>(k)] = coder.encode(block[k], exponent);
  }
}

void initialize_states(const Hyper& hyper, Format format, const Piece& piece) {
  const Optimizer optimizer = optimizer_of(hyper);
  Optimizers::for_each([&]<class T>(int) {
    const auto* config = std::get_if<typename T::Config>(&hyper);
    if (config == nullptr) return;
    for (int k = 0; k < T::kStateCount; ++k) {
      constexpr int64_t kAtATime = 64 * kScaleBlock;
      const std::vector<float> values(static_cast<size_t>(std::min(kAtATime, piece.elements)),
                                      T::initial(*config, k));
      for (int64_t at = 0; at < piece.elements; at += kAtATime) {
        const Range range{at, std::min(piece.elements, at + kAtATime)};
        store_state(optimizer, format, piece, range, k,
                    std::span(values).first(static_cast<size_t>(range.end - range.begin)));
      }
    }
  });
}

}  // namespace overspill::optim
