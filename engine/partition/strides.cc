#include "engine/partition/strides.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace overspill::engine {
namespace {

/// The dimensions that address something, the innermost in memory first.
std::vector<size_t> memory_order(std::span<const int64_t> shape, std::span<const int64_t> strides) {
  std::vector<size_t> order;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] > 1) order.push_back(d);
  }
  std::ranges::sort(order, {}, [&](size_t d) { return strides[d]; });
  return order;
}

}  // namespace

std::optional<std::vector<int64_t>> normal_strides(std::span<const int64_t> shape,
                                                   std::span<const int64_t> strides) {
  if (strides.empty()) return std::vector<int64_t>{};
  if (strides.size() != shape.size()) return std::nullopt;
  const auto negative = [](int64_t value) { return value < 0; };
  if (std::ranges::any_of(shape, negative) || std::ranges::any_of(strides, negative)) return std::nullopt;
  if (std::ranges::find(shape, 0) != shape.end()) return std::vector<int64_t>{};

  const std::vector<size_t> order = memory_order(shape, strides);
  std::vector<int64_t> normal(shape.size(), 1);
  int64_t due = 1;
  for (const size_t d : order) {
    if (strides[d] != due || __builtin_mul_overflow(due, shape[d], &due)) return std::nullopt;
    normal[d] = strides[d];
  }
  if (std::ranges::is_sorted(order, std::ranges::greater())) normal.clear();
  return normal;
}

RowMajor::RowMajor(std::span<const int64_t> shape, std::span<const int64_t> strides) {
  std::vector<int64_t> row_major(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    row_major[d] = left_;
    left_ *= shape[d];
  }
  for (const size_t d : memory_order(shape, strides)) dimensions_.push_back({shape[d], row_major[d], 0});
  if (dimensions_.size() < 2) throw std::invalid_argument("a tensor of one dimension lies row-major");
}

void RowMajor::place(std::span<const std::byte> elements, int64_t element_bytes,
                     std::span<std::byte> tensor) {
  switch (element_bytes) {
    case 1:
      return place_as<uint8_t>(elements, tensor);
    case 2:
      return place_as<uint16_t>(elements, tensor);
    case 4:
      return place_as<uint32_t>(elements, tensor);
    case 8:
      return place_as<uint64_t>(elements, tensor);
    default:
      throw std::invalid_argument(fmt::format("elements of {} bytes", element_bytes));
  }
}

template <typename Element>
void RowMajor::place_as(std::span<const std::byte> elements, std::span<std::byte> tensor) {
  const auto count = static_cast<int64_t>(elements.size() / sizeof(Element));
  if (count > left_) throw std::invalid_argument(fmt::format("{} elements where {} are left", count, left_));
  const std::byte* from = elements.data();
  for (int64_t done = 0; done < count;) {
    Dimension& inner = dimensions_.front();
    const int64_t run = std::min(count - done, inner.extent - inner.index);
    // Checked once a run: the last place of it is the furthest.
    const int64_t places = offset_ + (run - 1) * inner.stride + 1;
    if (places > static_cast<int64_t>(tensor.size() / sizeof(Element))) {
      throw std::invalid_argument(
          fmt::format("element {} of a tensor of {} bytes", places - 1, tensor.size()));
    }
    for (int64_t i = 0; i < run; ++i) {
      std::memcpy(tensor.data() + (offset_ + i * inner.stride) * static_cast<int64_t>(sizeof(Element)),
                  from + (done + i) * static_cast<int64_t>(sizeof(Element)), sizeof(Element));
    }
    done += run;
    inner.index += run;
    offset_ += run * inner.stride;
    if (inner.index == inner.extent) advance_outer();
  }
  left_ -= count;
}

/// The innermost dimension is through: the carry of an odometer.
void RowMajor::advance_outer() {
  for (size_t d = 0; d < dimensions_.size() && dimensions_[d].index == dimensions_[d].extent; ++d) {
    offset_ -= dimensions_[d].extent * dimensions_[d].stride;
    dimensions_[d].index = 0;
    if (d + 1 < dimensions_.size()) {
      ++dimensions_[d + 1].index;
      offset_ += dimensions_[d + 1].stride;
    }
  }
}

}  // namespace overspill::engine
