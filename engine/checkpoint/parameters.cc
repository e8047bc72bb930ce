#include "engine/checkpoint/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/checkpoint/states.h"
#include "engine/checkpoint/weights.h"
#include "engine/partition/model.h"
#include "engine/partition/strides.h"

namespace overspill::engine {
namespace {

constexpr int64_t kElementsAtATime = int64_t{1} << 20;

void require_size(std::string_view what, size_t given, int64_t needed) {
  if (static_cast<int64_t>(given) != needed) {
    throw std::invalid_argument(
        fmt::format("{} takes {} bytes, and memory of {} was given", what, needed, given));
  }
}

/// read(begin, count) gives elements of the unit as they lie there; those of the segment go to `to`
/// row-major.
template <typename Read>
void read_row_major(const ManifestSegment& segment, int64_t element_bytes, std::span<std::byte> to,
                    Read read) {
  std::optional<RowMajor> order;
  if (!segment.strides.empty()) order.emplace(segment.shape, segment.strides);
  for (int64_t done = 0; done < segment.elements; done += kElementsAtATime) {
    const int64_t count = std::min(kElementsAtATime, segment.elements - done);
    const std::span<const std::byte> bytes = read(segment.begin + done, count);
    if (order) {
      order->place(bytes, element_bytes, to);
    } else {
      std::ranges::copy(bytes, to.subspan(static_cast<size_t>(done * element_bytes)).begin());
    }
  }
}

}  // namespace

CheckpointParameters::CheckpointParameters(std::filesystem::path folder)
    : files_(std::move(folder)), manifest_(read_manifest(files_.folder())) {
  for (const ManifestUnit& unit : manifest_.units) {
    for (const ManifestSegment& segment : unit.segments)
      places_.emplace(segment.name, Place{&unit, &segment});
  }
}

CheckpointParameters::Place CheckpointParameters::place_of(std::string_view parameter) const {
  const auto found = places_.find(parameter);
  if (found == places_.end())
    throw CheckpointError(fmt::format("{} has no parameter '{}'", files_.folder().string(), parameter));
  return found->second;
}

void CheckpointParameters::read_weight(std::string_view parameter, const std::string& dtype,
                                       std::span<std::byte> to) const {
  const auto [unit, segment] = place_of(parameter);
  const bool converted = (dtype == "BF16" || dtype == "F32") && merged_dtype(*unit, dtype) == dtype;
  if (dtype != unit->dtype && !converted) {
    throw std::invalid_argument(
        fmt::format("{} is {} and cannot be read as {}", parameter, unit->dtype, dtype));
  }
  const int64_t element_bytes = dtype_bytes(dtype);
  require_size(parameter, to.size(), segment->elements * element_bytes);
  WeightReader reader(files_, *unit);
  read_row_major(*segment, element_bytes, to,
                 [&](int64_t begin, int64_t count) { return reader.read(begin, count, dtype); });
}

void CheckpointParameters::read_state(std::string_view parameter, std::string_view state,
                                      std::span<float> to) const {
  const auto [unit, segment] = place_of(parameter);
  require_size(parameter, to.size_bytes(), segment->elements * int64_t{sizeof(float)});
  StateReader reader(files_, *unit, state);
  std::vector<float> values;
  read_row_major(*segment, sizeof(float), std::as_writable_bytes(to), [&](int64_t begin, int64_t count) {
    values.resize(static_cast<size_t>(count));
    reader.read(begin, values);
    return std::as_bytes(std::span(values));
  });
}

}  // namespace overspill::engine
