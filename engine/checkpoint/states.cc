#include "engine/checkpoint/states.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cpu_optim/update.h"
#include "engine/checkpoint/weights.h"
#include "engine/partition/model.h"

namespace overspill::engine {
namespace {

constexpr int64_t kStateElements = int64_t{1} << 20;  // read and decoded at a time

void require_size(std::string_view what, int64_t given, int64_t needed) {
  if (given != needed)
    throw std::invalid_argument(
        fmt::format("{} takes {} bytes, and memory of {} was given", what, needed, given));
}

}  // namespace

StateReader::StateReader(const std::filesystem::path& folder, const ManifestUnit& unit,
                         std::string_view state)
    : folder_(folder), unit_(unit) {
  if (!unit.optimizer.empty()) {
    for (const auto& spec :
         optim::components(optim::optimizer_named(unit.optimizer), optim::format_named(unit.format))) {
      if (spec.name == state && spec.role == optim::Role::state) spec_ = &spec;
    }
  }
  if (spec_ == nullptr) {
    throw CheckpointError(fmt::format("{}: unit '{}' has no state '{}'", folder.string(), unit.name, state));
  }
  for (const ManifestPiece& piece : unit.pieces) {
    if (piece.component == state) pieces_.emplace(piece.begin, &piece);
  }
}

void StateReader::read(int64_t begin, std::span<float> values) {
  const int64_t end = begin + std::ssize(values);
  if (values.empty()) return;
  auto at = std::prev(pieces_.upper_bound(begin));
  for (int64_t element = begin; element < end; ++at) {
    const ManifestPiece& piece = *at->second;
    const int64_t stop = std::min(end, piece.begin + piece.elements);
    decode(piece, element - piece.begin, values.subspan(element - begin, stop - element));
    element = stop;
  }
}

/// `first`: element of the piece. Scaled elements are decoded with all of their block before them, so that a
/// block's scale is found at its place.
void StateReader::decode(const ManifestPiece& piece, int64_t first, std::span<float> values) {
  const int64_t lead = spec_->scaled ? first % optim::kScaleBlock : 0;
  const int64_t elements = lead + std::ssize(values);
  const int64_t codes = elements * spec_->element_bytes;
  bytes_.resize(static_cast<size_t>(spec_->bytes(elements)));
  const std::span<std::byte> all(bytes_);
  read_range_part(folder_, piece.range, (first - lead) * spec_->element_bytes, all.first(codes));
  if (spec_->scaled) {
    const int64_t scales = piece.elements * spec_->element_bytes + (first - lead) / optim::kScaleBlock;
    read_range_part(folder_, piece.range, scales, all.subspan(codes));
  }
  // Of a piece's components load_state reads the state alone.
  std::array<std::byte*, optim::kComponentsMax> components;
  components.fill(bytes_.data());
  const optim::Optimizer optimizer = optim::optimizer_named(unit_.optimizer);
  const optim::Format format = optim::format_named(unit_.format);
  const optim::Piece decoded{std::span(components).first(optim::components(optimizer, format).size()),
                             elements};
  optim::load_state(optimizer, format, decoded, {lead, elements}, spec_->state, values);
}

CheckpointParameters::CheckpointParameters(std::filesystem::path folder)
    : folder_(std::move(folder)), manifest_(read_manifest(folder_)) {
  for (const ManifestUnit& unit : manifest_.units) {
    for (const ManifestSegment& segment : unit.segments)
      places_.emplace(segment.name, Place{&unit, &segment});
  }
}

CheckpointParameters::Place CheckpointParameters::place_of(std::string_view parameter) const {
  const auto found = places_.find(parameter);
  if (found == places_.end())
    throw CheckpointError(fmt::format("{} has no parameter '{}'", folder_.string(), parameter));
  return found->second;
}

void CheckpointParameters::read_weight(std::string_view parameter, const std::string& wanted,
                                       std::span<std::byte> to) const {
  const auto [unit, segment] = place_of(parameter);
  const std::string dtype = merged_dtype(*unit, wanted);
  const int64_t element_bytes = dtype_bytes(dtype);
  require_size(parameter, std::ssize(to), segment->elements * element_bytes);
  WeightReader reader(folder_, *unit);
  for (int64_t done = 0; done < segment->elements; done += kStateElements) {
    const int64_t count = std::min(kStateElements, segment->elements - done);
    const auto read = reader.read(segment->begin + done, count, dtype);
    std::memcpy(to.data() + done * element_bytes, read.data(), read.size());
  }
}

void CheckpointParameters::read_state(std::string_view parameter, std::string_view state,
                                      std::span<float> to) const {
  const auto [unit, segment] = place_of(parameter);
  require_size(parameter, std::ssize(to) * 4, segment->elements * 4);
  StateReader reader(folder_, *unit, state);
  for (int64_t done = 0; done < segment->elements; done += kStateElements) {
    const int64_t count = std::min(kStateElements, segment->elements - done);
    reader.read(segment->begin + done, to.subspan(done, count));
  }
}

}  // namespace overspill::engine
