#include "engine/checkpoint/tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/partition/strides.h"

namespace overspill::engine {
namespace {

constexpr int64_t kElementsAtATime = int64_t{1} << 20;

/// read(begin, count) gives elements of the segment as they lie in the unit; they go to `to` row-major.
template <typename Read>
void read_row_major(const ManifestSegment& segment, int64_t element_bytes, std::span<std::byte> to,
                    Read read) {
  std::unique_ptr<RowMajor> order;
  if (!segment.strides.empty()) order = std::make_unique<RowMajor>(segment.shape, segment.strides);
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

StoredTensors::StoredTensors(const std::filesystem::path& folder)
    : folder_(folder), manifest_(read_manifest(folder)) {}

void StoredTensors::read_weight(int64_t unit, int64_t segment, const std::string& dtype,
                                std::span<std::byte> to) {
  const ManifestSegment& found = open(unit, segment, to.size(), dtype_bytes(dtype));
  if (dtype != merged_dtype(manifest_.units[static_cast<size_t>(unit)], dtype)) {
    throw std::invalid_argument(fmt::format("{} cannot be read as {}", found.name, dtype));
  }
  read_row_major(found, dtype_bytes(dtype), to,
                 [&](int64_t begin, int64_t count) { return reader_->read(begin, count, dtype); });
}

void StoredTensors::read_state(int64_t unit, int64_t segment, std::string_view component,
                               std::span<float> to) {
  const ManifestSegment& found = open(unit, segment, to.size_bytes(), sizeof(float));
  read_row_major(found, sizeof(float), std::as_writable_bytes(to), [&](int64_t begin, int64_t count) {
    return std::as_bytes(reader_->read_state(begin, count, component));
  });
}

const ManifestSegment& StoredTensors::open(int64_t unit, int64_t segment, size_t bytes,
                                           int64_t element_bytes) {
  const auto& units = manifest_.units;
  if (unit < 0 || unit >= std::ssize(units) || segment < 0 ||
      segment >= std::ssize(units[static_cast<size_t>(unit)].segments)) {
    throw std::invalid_argument(fmt::format("the manifest has no segment {} of a unit {}", segment, unit));
  }
  const ManifestUnit& found = units[static_cast<size_t>(unit)];
  const ManifestSegment& tensor = found.segments[static_cast<size_t>(segment)];
  if (element_bytes == 0 || static_cast<int64_t>(bytes) != tensor.elements * element_bytes) {
    throw std::invalid_argument(fmt::format("{} has {} elements of {} bytes, and {} bytes are to be read",
                                            tensor.name, tensor.elements, element_bytes, bytes));
  }
  if (unit != opened_) {
    reader_ = std::make_unique<WeightReader>(folder_, found);
    opened_ = unit;
  }
  return tensor;
}

}  // namespace overspill::engine
