#include "engine/checkpoint/weights.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu_optim/split.h"
#include "engine/checkpoint/manifest_check.h"

namespace overspill::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors and checkpoints are little-endian");

template <typename Value>
Value load(std::span<const std::byte> from, int64_t i) {
  Value value;
  std::memcpy(&value, from.data() + i * sizeof(Value), sizeof(Value));
  return value;
}

/// IEEE half to single, exact. Subnormals: m * 2^-24. Infinity and NaN keep their mantissa.
float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu;
  const uint32_t mantissa = half & 0x3FFu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  const uint32_t wide_exponent = exponent == 0x1F ? 0xFFu : exponent + 112;  // 127 - 15
  return std::bit_cast<float>(sign | wide_exponent << 23 | mantissa << 13);
}

/// Round to nearest even, as frameworks cast. A NaN stays one though its low mantissa bits go.
uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace

std::string merged_dtype(const ManifestUnit& unit, const std::string& wanted) {
  const bool converts = unit.dtype == "BF16" || unit.dtype == "F16" || unit.dtype == "F32";
  return converts ? wanted : unit.dtype;
}

void WeightReader::turn_to(const ManifestUnit& unit) {
  unit_ = &unit;
  pieces_.clear();
  for (const ManifestPiece& piece : unit.pieces) pieces_[piece.component].emplace(piece.begin, &piece);
}

std::span<const std::byte> WeightReader::read(int64_t begin, int64_t count, const std::string& dtype) {
  const auto names = components_of(*unit_);
  // The weight that forward used, where that is wanted; of fp16 the master is nearer to the bf16 weight.
  const bool own = dtype == unit_->dtype;
  const bool master = !own && names.size() > 1 && unit_->format != "fp32";
  if (own || !master || unit_->format != "fp16") gather(names[0], begin, count, hi_);
  if (own) return hi_.bytes;
  if (master) gather(names[1], begin, count, lo_);
  to_float(count);
  if (dtype == "F32") return std::as_bytes(std::span(floats_));
  to_bf16(count);
  return std::as_bytes(std::span(halves_));
}

void WeightReader::gather(std::string_view component, int64_t begin, int64_t count, Run& run) const {
  run.bytes = {};
  if (count == 0) return;
  const int64_t element_bytes = component_element_bytes(*unit_, component);
  const auto& pieces = pieces_.find(component)->second;
  auto at = std::prev(pieces.upper_bound(begin));
  for (int64_t element = begin; element < begin + count; ++at) {
    const ManifestPiece& piece = *at->second;
    const int64_t end = std::min(begin + count, piece.begin + piece.elements);
    run.bytes = files_.read(piece.range, (element - piece.begin) * element_bytes,
                            (end - element) * element_bytes, run.buffer);
    if (element == begin && end == begin + count) return;
    if (element == begin) run.joined.clear();
    run.joined.insert(run.joined.end(), run.bytes.begin(), run.bytes.end());
    element = end;
  }
  run.bytes = run.joined;
}

/// value(i) is the weight of element i.
template <typename Join>
void WeightReader::join(int64_t count, Join value) {
  float* const to = floats_.data();
  for (int64_t i = 0; i < count; ++i) to[i] = value(i);
}

void WeightReader::to_float(int64_t count) {
  floats_.resize(count);
  const std::span<const std::byte> hi = hi_.bytes, lo = lo_.bytes;
  if (unit_->format == "exact" || unit_->format == "compact") {
    join(count, [=](int64_t i) {
      return std::bit_cast<float>(optim::join_split(load<uint16_t>(hi, i), load<int16_t>(lo, i)));
    });
  } else if (unit_->format == "8bit") {
    join(count, [=](int64_t i) {
      const auto low = static_cast<int16_t>(load<int8_t>(lo, i) * 256);
      return std::bit_cast<float>(optim::join_split(load<uint16_t>(hi, i), low));
    });
  } else if (unit_->format == "fp16") {
    join(count, [=](int64_t i) { return load<float>(lo, i); });
  } else if (unit_->dtype == "F32") {
    join(count, [=](int64_t i) { return load<float>(hi, i); });
  } else if (unit_->dtype == "F16") {
    join(count, [=](int64_t i) { return half_to_float(load<uint16_t>(hi, i)); });
  } else {
    join(count,
         [=](int64_t i) { return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(hi, i)) << 16); });
  }
}

void WeightReader::to_bf16(int64_t count) {
  halves_.resize(count);
  std::transform(floats_.begin(), floats_.end(), halves_.begin(), float_to_bf16);
}

}  // namespace overspill::engine
