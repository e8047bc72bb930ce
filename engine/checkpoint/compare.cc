#include "engine/checkpoint/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <string_view>

#include "engine/checkpoint/weights.h"
#include "engine/partition/model.h"

namespace overspill::engine {
namespace {

constexpr int64_t kComparedElements = int64_t{1} << 20;  // at a time

/// A parameter and its place.
struct ComparedPlace {
  const ManifestUnit* unit;
  const ManifestSegment* segment;
};

std::map<std::string_view, ComparedPlace> compared_places(const Manifest& manifest) {
  std::map<std::string_view, ComparedPlace> places;
  for (const ManifestUnit& unit : manifest.units) {
    for (const ManifestSegment& segment : unit.segments)
      places.emplace(segment.name, ComparedPlace{&unit, &segment});
  }
  return places;
}

bool comparable(const ComparedPlace& first, const ComparedPlace& second) {
  return first.segment->shape == second.segment->shape && first.segment->strides == second.segment->strides &&
         first.segment->elements == second.segment->elements &&
         merged_dtype(*first.unit, "F32") == merged_dtype(*second.unit, "F32");
}

/// ComparedSums over one parameter.
class ComparedSums {
 public:
  ComparedSums(std::string name, std::string dtype)
      : dtype_(std::move(dtype)), element_bytes_(dtype_bytes(dtype_)) {
    found_.name = std::move(name);
  }

  void add(std::span<const std::byte> first, std::span<const std::byte> second) {
    found_.elements += std::ssize(first) / element_bytes_;
    for (int64_t at = 0; at < std::ssize(first); at += element_bytes_) {
      if (std::memcmp(first.data() + at, second.data() + at, element_bytes_) != 0) ++found_.differing;
    }
    if (dtype_ == "F32") add_values<float>(first, second);
    if (dtype_ == "F64") add_values<double>(first, second);
  }

  WeightDifference take() {
    if (found_.elements > 0) {
      found_.rms = std::sqrt(squares_ / static_cast<double>(found_.elements));
      found_.rms_of_first = std::sqrt(squares_of_first_ / static_cast<double>(found_.elements));
    }
    return std::move(found_);
  }

 private:
  template <typename Value>
  void add_values(std::span<const std::byte> first, std::span<const std::byte> second) {
    for (size_t at = 0; at < first.size(); at += sizeof(Value)) {
      Value a, b;
      std::memcpy(&a, first.data() + at, sizeof a);
      std::memcpy(&b, second.data() + at, sizeof b);
      const double difference = std::abs(static_cast<double>(b) - static_cast<double>(a));
      // Not std::max: it would pass a NaN over. One that was found stays.
      if (!std::isnan(found_.largest) && !(difference <= found_.largest)) found_.largest = difference;
      squares_ += difference * difference;
      squares_of_first_ += static_cast<double>(a) * static_cast<double>(a);
    }
  }

  std::string dtype_;
  int64_t element_bytes_;
  WeightDifference found_;
  double squares_ = 0;
  double squares_of_first_ = 0;
};

}  // namespace

std::vector<WeightDifference> compare_weights(const std::filesystem::path& first,
                                              const std::filesystem::path& second,
                                              void (*progress)(void*, int64_t, int64_t), void* context) {
  const Manifest one = read_manifest(first), other = read_manifest(second);
  const std::map<std::string_view, ComparedPlace> places = compared_places(other);
  const auto both = [&](const ManifestUnit& unit, const ManifestSegment& segment) -> const ComparedPlace* {
    const auto found = places.find(segment.name);
    if (found == places.end() || !comparable({&unit, &segment}, found->second)) return nullptr;
    return &found->second;
  };
  const CheckpointReader first_files(first), second_files(second);
  int64_t total = 0, done = 0;
  for (const ManifestUnit& unit : one.units) {
    for (const ManifestSegment& segment : unit.segments)
      total += both(unit, segment) != nullptr ? segment.elements : 0;
  }
  std::vector<WeightDifference> differences;
  for (const ManifestUnit& unit : one.units) {
    const std::string dtype = merged_dtype(unit, "F32");
    WeightReader from_first(first_files, unit);
    for (const ManifestSegment& segment : unit.segments) {
      const ComparedPlace* const place = both(unit, segment);
      if (place == nullptr) continue;
      WeightReader from_second(second_files, *place->unit);
      ComparedSums sums(segment.name, dtype);
      for (int64_t at = 0; at < segment.elements; at += kComparedElements) {
        const int64_t count = std::min(kComparedElements, segment.elements - at);
        sums.add(from_first.read(segment.begin + at, count, dtype),
                 from_second.read(place->segment->begin + at, count, dtype));
        done += count;
        if (progress != nullptr) progress(context, done, total);
      }
      differences.push_back(sums.take());
    }
  }
  return differences;
}

}  // namespace overspill::engine
