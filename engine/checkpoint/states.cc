#include "engine/checkpoint/states.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "cpu_optim/update.h"

namespace overspill::engine {

StateReader::StateReader(const CheckpointReader& files, const ManifestUnit& unit, std::string_view state)
    : files_(files), unit_(unit) {
  if (!unit.optimizer.empty()) {
    for (const auto& spec :
         optim::components(optim::optimizer_named(unit.optimizer), optim::format_named(unit.format))) {
      if (spec.name == state && spec.role == optim::Role::state) spec_ = &spec;
    }
  }
  if (spec_ == nullptr) {
    throw CheckpointError(
        fmt::format("{}: unit '{}' has no state '{}'", files.folder().string(), unit.name, state));
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
  const auto read = [&](int64_t begin, std::span<std::byte> to) {
    std::ranges::copy(files_.read(piece.range, begin, std::ssize(to), buffer_), to.begin());
  };
  read((first - lead) * spec_->element_bytes, all.first(codes));
  if (spec_->scaled) {
    const int64_t scales = piece.elements * spec_->element_bytes + (first - lead) / optim::kScaleBlock;
    read(scales, all.subspan(codes));
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

}  // namespace overspill::engine
