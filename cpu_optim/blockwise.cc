#include "cpu_optim/blockwise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/elements.h"
#include "cpu_optim/floating_point.h"

namespace overspill::optim {
namespace {

constexpr std::array<float, 16> kNf4 = {
    -1.0F,
    -0.6961928009986877F,
    -0.5250730514526367F,
    -0.39491748809814453F,
    -0.28444138169288635F,
    -0.18477343022823334F,
    -0.09105003625154495F,
    0.0F,
    0.07958029955625534F,
    0.16093020141124725F,
    0.24611230194568634F,
    0.33791524171829224F,
    0.44070982933044434F,
    0.5626170039176941F,
    0.7229568362236023F,
    1.0F,
};
constexpr float kInt8Most = 127.0F;

using Block = std::array<float, kPackingBlock>;
constexpr int64_t kBlocksAtOnce = 32;

int64_t code_bytes(Packing packing) {
  return packing == Packing::nf4 ? kPackingBlock / 2 : kPackingBlock;
}

int64_t blocks_of(int64_t elements) {
  return (elements + kPackingBlock - 1) / kPackingBlock;
}

/// The place in the table of what is nearest; the lower one of two that are equally near.
uint8_t nearest_nf4(float x) {
  uint8_t code = 0;
  for (size_t i = 0; i + 1 < kNf4.size(); ++i)
    code = static_cast<uint8_t>(code + (x > (kNf4[i] + kNf4[i + 1]) / 2 ? 1 : 0));
  return code;
}

void encode(Packing packing, const Block& quotients, std::byte* codes) {
  if (packing == Packing::int8) {
    for (int64_t i = 0; i < kPackingBlock; ++i)
      codes[i] = static_cast<std::byte>(
          static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(quotients[i] * kInt8Most))));
    return;
  }
  for (int64_t i = 0; i < kPackingBlock / 2; ++i)
    codes[i] = static_cast<std::byte>(nearest_nf4(quotients[2 * i]) << 4 | nearest_nf4(quotients[2 * i + 1]));
}

void decode(Packing packing, const std::byte* codes, float magnitude, Block& values) {
  if (packing == Packing::int8) {
    for (int64_t i = 0; i < kPackingBlock; ++i)
      values[i] =
          static_cast<float>(static_cast<int8_t>(std::to_integer<uint8_t>(codes[i]))) / kInt8Most * magnitude;
    return;
  }
  std::array<float, 16> scaled{};
  for (size_t i = 0; i < scaled.size(); ++i) scaled[i] = kNf4[i] * magnitude;
  for (int64_t i = 0; i < kPackingBlock / 2; ++i) {
    const auto both = std::to_integer<uint8_t>(codes[i]);
    values[2 * i] = scaled[both >> 4];
    values[2 * i + 1] = scaled[both & 15];
  }
}

/// Checks both arrays, and returns how many values they have.
template <class Values, class Packed>
int64_t elements_of(const char* function, Packing packing, Element element, Values values, Packed packed) {
  if (element == Element::fp16)
    throw std::invalid_argument(std::string(function) + ": values are bf16 or fp32, not fp16");
  const int64_t width = bytes(element);
  const int64_t elements = std::ssize(values) / width;
  const int64_t wanted = packed_bytes(packing, element, elements);
  if (std::ssize(values) % width != 0 || std::ssize(packed) != wanted) {
    throw std::invalid_argument(std::string(function) + ": " + std::to_string(values.size()) +
                                " bytes of values take " + std::to_string(wanted) + " bytes packed, " +
                                std::to_string(packed.size()) + " were given");
  }
  return elements;
}

template <class T>
void pack_as(Packing packing, Element element, std::span<const std::byte> values, std::span<std::byte> packed,
             int64_t elements) {
  const int64_t blocks = blocks_of(elements);
  const auto magnitudes = span_of<T>(packed.data() + blocks * code_bytes(packing), blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = b * kPackingBlock;
    const int64_t count = std::min(kPackingBlock, elements - begin);
    Block block{};
    widen(element, values.data() + begin * bytes(element), std::span(block).first(static_cast<size_t>(count)),
          true);
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!std::isfinite(block[i])) {
        throw std::invalid_argument("pack: element " + std::to_string(begin + i) + " is " +
                                    std::to_string(block[i]) + ", and a block has no magnitude then");
      }
      largest = std::max(largest, std::abs(block[i]));
    }
    if (largest > 0) {
      for (float& x : block) x /= largest;
    }
    encode(packing, block, packed.data() + b * code_bytes(packing));
    narrow(element, std::span<const float>(&largest, 1), reinterpret_cast<std::byte*>(&magnitudes[b]));
  }
}

template <class T>
void unpack_as(Packing packing, Element element, std::span<const std::byte> packed,
               std::span<std::byte> values, int64_t elements) {
  const int64_t blocks = blocks_of(elements);
  const auto magnitudes = span_of<T>(packed.data() + blocks * code_bytes(packing), blocks);
  std::array<Block, kBlocksAtOnce> run;
  std::array<float, kBlocksAtOnce> wide;
  for (int64_t b = 0; b < blocks; b += kBlocksAtOnce) {
    const int64_t count = std::min(kBlocksAtOnce, blocks - b);
    widen(element, reinterpret_cast<const std::byte*>(&magnitudes[b]),
          std::span(wide).first(static_cast<size_t>(count)), true);
    for (int64_t i = 0; i < count; ++i)
      decode(packing, packed.data() + (b + i) * code_bytes(packing), wide[i], run[i]);
    const int64_t begin = b * kPackingBlock;
    const int64_t end = std::min(elements, begin + count * kPackingBlock);
    narrow(element, std::span<const float>(run[0].data(), static_cast<size_t>(end - begin)),
           values.data() + begin * bytes(element));
  }
}

}  // namespace

Packing packing_named(std::string_view name) {
  if (name == "nf4") return Packing::nf4;
  if (name == "int8") return Packing::int8;
  throw std::invalid_argument(std::string(name) + " is no packing of frozen weights: nf4 and int8 are");
}

int64_t packed_bytes(Packing packing, Element element, int64_t elements) {
  return blocks_of(elements) * (code_bytes(packing) + bytes(element));
}

void pack(Packing packing, Element element, std::span<const std::byte> values, std::span<std::byte> packed) {
  const int64_t elements = elements_of("pack", packing, element, values, packed);
  const FloatingPointMode mode;
  if (element == Element::bf16) return pack_as<uint16_t>(packing, element, values, packed, elements);
  pack_as<float>(packing, element, values, packed, elements);
}

void unpack(Packing packing, Element element, std::span<const std::byte> packed,
            std::span<std::byte> values) {
  const int64_t elements = elements_of("unpack", packing, element, values, packed);
  const FloatingPointMode mode;
  if (element == Element::bf16) return unpack_as<uint16_t>(packing, element, packed, values, elements);
  unpack_as<float>(packing, element, packed, values, elements);
}

}  // namespace overspill::optim
