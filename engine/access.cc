#include "engine/access.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace overspill::engine {
Access::Access(Context& context)
    : context_(context), scratch_(context.host_budget, context.plan.access_bytes, "access from outside") {}

template <class Visit>
void Access::for_each_chunk(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit) {
  const Unit& u = context_.layout.units[unit];
  if (begin < 0 || elements < 0 || begin > u.shard_elements - elements) {
    throw std::logic_error(fmt::format("{}: elements {} to {} are outside its shard of {}", u.name, begin,
                                       begin + elements, u.shard_elements));
  }
  if (u.component_bytes(component) == 0) {
    throw std::invalid_argument(
        fmt::format("{} ({}) has no {}", u.name, format_name(u.format), component_name(component)));
  }
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Chunk& chunk = context_.layout.chunks[c];
    const int64_t from = std::max(begin, chunk.begin);
    const int64_t to = std::min(begin + elements, chunk.begin + chunk.elements);
    if (from < to) visit(c, from - chunk.begin, from - begin, to - from);
  }
}

void Access::read(int32_t unit, Component component, int64_t begin, std::span<std::byte> to) {
  const int64_t width = std::max<int64_t>(1, context_.layout.units[unit].component_bytes(component));
  const auto elements = static_cast<int64_t>(to.size()) / width;
  for_each_chunk(
      unit, component, begin, elements, [&](int32_t c, int64_t in_chunk, int64_t in_span, int64_t count) {
        const std::byte* from = context_.chunks[c].home[static_cast<size_t>(component)];
        if (from == nullptr) {
          load(c, component);
          from = scratch_.data();
        }
        std::memcpy(to.data() + in_span * width, from + in_chunk * width, static_cast<size_t>(count * width));
      });
}

void Access::write(int32_t unit, Component component, int64_t begin, std::span<const std::byte> from) {
  const int64_t width = std::max<int64_t>(1, context_.layout.units[unit].component_bytes(component));
  const auto elements = static_cast<int64_t>(from.size()) / width;
  for_each_chunk(
      unit, component, begin, elements, [&](int32_t c, int64_t in_chunk, int64_t in_span, int64_t count) {
        std::byte* home = context_.chunks[c].home[static_cast<size_t>(component)];
        const bool on_nvme = home == nullptr;
        if (on_nvme && count < context_.layout.chunks[c].elements) load(c, component);
        std::byte* to = on_nvme ? scratch_.data() : home;
        std::memcpy(to + in_chunk * width, from.data() + in_span * width, static_cast<size_t>(count * width));
        if (on_nvme) store(c, component);
      });
}

void Access::clear(int32_t unit, Component component, int64_t begin, int64_t elements) {
  const int64_t width = std::max<int64_t>(1, context_.layout.units[unit].component_bytes(component));
  for_each_chunk(unit, component, begin, elements, [&](int32_t c, int64_t in_chunk, int64_t, int64_t count) {
    ChunkState& state = context_.chunks[c];
    std::byte* home = state.home[static_cast<size_t>(component)];
    const bool on_nvme = home == nullptr;
    if (on_nvme && state.extents[static_cast<size_t>(component)].empty()) return;  // zero already
    if (on_nvme) load(c, component);
    std::memset((on_nvme ? scratch_.data() : home) + in_chunk * width, 0, static_cast<size_t>(count * width));
    if (on_nvme) store(c, component);
  });
}

void Access::load(int32_t chunk, Component component) {
  io::Extent extent = context_.chunks[chunk].extents[static_cast<size_t>(component)];
  if (extent.empty()) {
    std::memset(scratch_.data(), 0, static_cast<size_t>(context_.component_bytes(chunk, component)));
    return;
  }
  transfer(io::Transfer::Kind::read, extent);
}

void Access::store(int32_t chunk, Component component) {
  io::Extent& extent = context_.chunks[chunk].extents[static_cast<size_t>(component)];
  io::Extent fresh = context_.store().allocate(context_.component_bytes(chunk, component));
  try {
    transfer(io::Transfer::Kind::write, fresh);
  } catch (...) {
    context_.store().release(fresh);
    throw;
  }
  if (!extent.empty()) context_.store().release(extent);
  extent = fresh;
}

void Access::transfer(io::Transfer::Kind kind, io::Extent& extent) {
  if (extent.bytes > scratch_.bytes()) throw std::logic_error("an extent is larger than the scratch buffer");
  io::Transfer transfer;
  transfer.kind = kind;
  transfer.priority = io::Transfer::Priority::demand;
  transfer.extent = extent;
  transfer.memory = scratch_.data();
  transfer.context = &done_;
  transfer.on_complete = [](io::Transfer& t) noexcept {
    static_cast<std::binary_semaphore*>(t.context)->release();
  };
  context_.store().submit(transfer);
  bool done = done_.try_acquire();
  while (!done && context_.store().poll()) done = done_.try_acquire();
  if (!done) done_.acquire();
  extent = transfer.extent;
  if (transfer.error) throw io::StoreError(*transfer.error);
}

}  // namespace overspill::engine
