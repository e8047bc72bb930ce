#include "engine/states/update_task.h"

#include <algorithm>
#include <cstring>

#include "io/checksum.h"

namespace overspill::engine {
namespace {

constexpr int64_t kCopiedElements = 16 * 1024;  // at a time: old and new states stay in the L2 cache

/// Scales lie behind a whole chunk's codes, so that such a chunk is one block.
bool has_scales(const Unit& unit) {
  return std::ranges::any_of(unit.components(), &optim::ComponentSpec::scaled);
}

/// The optimizer's states among the unit's components: all but the weights.
template <class Visit>
void for_each_state(const Unit& unit, std::span<io::Sealed> states, Visit visit) {
  if (states.empty()) return;
  for (const Component state : kAllComponents) {
    if (state != Component::hi && unit.has(state))
      visit(states[static_cast<size_t>(state)], static_cast<size_t>(state),
            unit.component_element_bytes(state));
  }
}

}  // namespace

void update_chunk(const Unit& unit, const Chunk& chunk, std::span<const optim::Factors> factors,
                  std::span<const uint8_t> present, const ChunkMemory& memory, optim::Gradient gradients,
                  optim::Range within) {
  const optim::Piece piece{.components = std::span(memory.component).first(unit.components().size()),
                           .elements = chunk.elements,
                           .index = memory.index,
                           .seed = memory.seed};
  for (const Run& run : chunk.runs) {
    const optim::Range range{std::max(run.begin, within.begin),
                             std::min(run.begin + run.elements, within.end)};
    if (present[run.segment] == 0 || range.begin >= range.end) continue;
    optim::update(*unit.format, piece, gradients, range, factors[run.segment]);
  }
}

bool UpdateTask::copies() const {
  return std::ranges::any_of(old, [](const std::byte* data) { return data != nullptr; });
}

/// Of elements begin <= i < end; of a chunk that ends there its scales, too.
void UpdateTask::copy(int64_t begin, int64_t end) const {
  for (size_t i = 0; i < old.size(); ++i) {
    if (old[i] == nullptr) continue;
    const Component component{static_cast<uint8_t>(i)};
    const int64_t from = begin * unit.component_element_bytes(component);
    const int64_t to = end == chunk.elements ? unit.component_bytes(component, end)
                                             : end * unit.component_element_bytes(component);
    std::memcpy(memory.component[i] + from, old[i] + from, static_cast<size_t>(to - from));
  }
}

/// Every state's block is a multiple of its checksums' blocks.
int64_t UpdateTask::elements_at_a_time() const {
  if (has_scales(unit)) return chunk.elements;
  int64_t elements = !states.empty() ? 0 : copies() ? kCopiedElements : chunk.elements;
  for_each_state(unit, states, [&](const io::Sealed&, size_t, int64_t width) {
    elements = std::max(elements, io::kChecksumBlockBytes / width);
  });
  return elements;
}

void UpdateTask::run(io::Store* store) {
  for (const std::span<std::byte> bytes : never_written) std::ranges::fill(bytes, std::byte{0});
  const bool scaled = has_scales(unit);
  const int64_t all = chunk.elements;
  const int64_t step = elements_at_a_time();
  for (int64_t begin = 0; begin < all; begin += step) {
    const int64_t end = std::min(begin + step, all);
    copy(begin, end);
    const auto end_of = [&](const io::Sealed& state, int64_t width) {
      return scaled ? state.bytes() : end * width;
    };
    for_each_state(unit, states, [&](io::Sealed& state, size_t i, int64_t width) {
      memory.component[i] = state.open(*store, begin * width, end_of(state, width)) - begin * width;
    });
    update_chunk(unit, chunk, factors, present, memory, {gradients, element}, {begin, end});
    for_each_state(unit, states, [&](io::Sealed& state, size_t, int64_t width) {
      state.seal(begin * width, end_of(state, width));
    });
  }
}

}  // namespace overspill::engine
