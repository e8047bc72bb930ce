#include "engine/weights/access.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpu_optim/gradient.h"
#include "cpu_optim/update.h"
#include "io/transfer_now.h"

namespace overspill::engine {
namespace {

constexpr Component kMaster{1};

/// Conversions of weights look at no state, so they go by way of the optimizer that has none.
optim::Optimizer stateless() {
  return optim::optimizer_of(optim::SgdConfig{});
}

/// hi, and the master beside it, of some elements: what conversions of weights work on.
class WeightBuffers {
 public:
  WeightBuffers(const Unit& unit, int64_t elements) : unit_(unit) {
    for (size_t i = 0; i < count(); ++i)
      memory_[i].resize(static_cast<size_t>(elements * unit.component_element_bytes(Component{i_of(i)})));
  }
  size_t count() const { return optim::components(stateless(), *unit_.format).size(); }
  std::span<std::byte> bytes(size_t i, int64_t elements) {
    const int64_t width = unit_.component_element_bytes(Component{i_of(i)});
    return std::span(memory_[i]).first(static_cast<size_t>(elements * width));
  }
  void load(std::span<float> values) {
    optim::load_weights(stateless(), *unit_.format, piece(values.size()), range(values.size()), values);
  }
  void store(std::span<const float> values) {
    optim::store_weights(stateless(), *unit_.format, piece(values.size()), range(values.size()), values);
  }

 private:
  static uint8_t i_of(size_t i) { return static_cast<uint8_t>(i); }
  static optim::Range range(size_t elements) { return {0, static_cast<int64_t>(elements)}; }
  optim::Piece piece(size_t elements) {
    pointers_ = {memory_[0].data(), memory_[1].data()};
    return {.components = std::span(pointers_).first(count()), .elements = static_cast<int64_t>(elements)};
  }

  const Unit& unit_;
  std::array<std::vector<std::byte>, 2> memory_;
  std::array<std::byte*, 2> pointers_{};
};

/// A piece of which only one state is looked at.
class StatePiece {
 public:
  StatePiece(const Unit& unit, Component component, std::byte* memory, int64_t elements)
      : state_(unit.components()[static_cast<size_t>(component)].state) {
    pointers_.fill(memory);
    piece_ = {.components = std::span(pointers_).first(unit.components().size()), .elements = elements};
  }
  StatePiece(const StatePiece&) = delete;
  StatePiece& operator=(const StatePiece&) = delete;
  const optim::Piece& piece() const { return piece_; }
  int state() const { return state_; }

 private:
  int state_;
  std::array<std::byte*, kComponents> pointers_;
  optim::Piece piece_;
};

std::span<const float> first(std::span<const float> values, int64_t begin, int64_t count) {
  return values.subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
}

}  // namespace

Access::Access(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model,
               DeviceUnits& device_units)
    : setup_(setup),
      core_(core),
      hardware_(hardware),
      model_(model),
      device_units_(device_units),
      scratch_(hardware.device(), hardware.host_budget, setup.plan.access_bytes, "access from outside") {}

template <class Visit>
void Access::for_each_part(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit) {
  const Unit& u = setup_.layout.units[unit];
  if (begin < 0 || elements < 0 || begin > u.shard_elements - elements) {
    throw std::logic_error(fmt::format("{}: elements {} to {} are outside its shard of {}", u.name, begin,
                                       begin + elements, u.shard_elements));
  }
  if (!u.has(component)) {
    throw std::invalid_argument(fmt::format("{} ({}) has no component {}", u.name, format_name(u.format),
                                            static_cast<int>(component)));
  }
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Chunk& chunk = setup_.layout.chunks[c];
    const int64_t from = std::max(begin, chunk.begin);
    const int64_t to = std::min(begin + elements, chunk.begin + chunk.elements);
    if (from < to) visit(Part{c, from - chunk.begin, from - begin, to - from});
  }
}

/// visit(memory of the chunk's component, part)
template <class Visit>
void Access::read_parts(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit) {
  for_each_part(unit, component, begin, elements, [&](const Part& part) {
    std::byte* from = model_.chunks[part.chunk].home[static_cast<size_t>(component)];
    if (from == nullptr) {
      load(part.chunk, component);
      from = scratch_.data();
    }
    visit(from, part);
  });
}

template <class Visit>
void Access::write_parts(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit) {
  for_each_part(unit, component, begin, elements, [&](const Part& part) {
    if (std::byte* home = model_.chunks[part.chunk].home[static_cast<size_t>(component)])
      return visit(home, part);
    write_away(component, part, visit);
  });
}

/// Of a chunk whose component is not in memory.
template <class Visit>
void Access::write_away(Component component, const Part& part, Visit visit) {
  if (part.elements < setup_.layout.chunks[part.chunk].elements) load(part.chunk, component);
  visit(scratch_.data(), part);
  store(part.chunk, component);
}

std::span<const std::byte> Access::whole(int32_t chunk, Component component) {
  if (const std::byte* home = model_.chunks[chunk].home[static_cast<size_t>(component)])
    return {home, static_cast<size_t>(setup_.component_bytes(chunk, component))};
  load(chunk, component);
  return scratch_of(chunk, component);
}

void Access::read(int32_t unit, Component component, int64_t begin, std::span<std::byte> to) {
  const int64_t width = setup_.layout.units[unit].component_element_bytes(component);
  read_parts(unit, component, begin, static_cast<int64_t>(to.size()) / width,
             [&](const std::byte* from, const Part& part) {
               std::memcpy(to.data() + part.in_span * width, from + part.in_chunk * width,
                           static_cast<size_t>(part.elements * width));
             });
}

/// The same, with all that is at home beside each other: memory that nobody has used costs more to touch for
/// the first time than to write. visit() is called on several threads at once. away(part): of one that is not
/// at home.
template <class Visit, class Away>
void Access::write_parts_together(int32_t unit, Component component, int64_t begin, int64_t elements,
                                  Visit visit, Away away) {
  struct AtHome {
    std::byte* memory;
    Part part;
  };
  std::vector<AtHome> at_home;
  for_each_part(unit, component, begin, elements, [&](const Part& part) {
    if (std::byte* home = model_.chunks[part.chunk].home[static_cast<size_t>(component)]) {
      at_home.push_back({home, part});
    } else {
      away(part);
    }
  });
  if (at_home.size() == 1) return visit(at_home[0].memory, at_home[0].part);
  hardware_.executor->parallel_for(std::ssize(at_home), [&](int64_t i) {
    visit(at_home[static_cast<size_t>(i)].memory, at_home[static_cast<size_t>(i)].part);
  });
}

void Access::write(int32_t unit, Component component, int64_t begin, std::span<const std::byte> from) {
  const int64_t width = setup_.layout.units[unit].component_element_bytes(component);
  const auto copy = [&](std::byte* to, const Part& part) {
    std::memcpy(to + part.in_chunk * width, from.data() + part.in_span * width,
                static_cast<size_t>(part.elements * width));
  };
  write_parts_together(unit, component, begin, static_cast<int64_t>(from.size()) / width, copy,
                       [&](const Part& part) { write_away(component, part, copy); });
}

void Access::clear(int32_t unit, Component component, int64_t begin, int64_t elements) {
  const int64_t width = setup_.layout.units[unit].component_element_bytes(component);
  const auto zero = [&](std::byte* to, const Part& part) {
    std::memset(to + part.in_chunk * width, 0, static_cast<size_t>(part.elements * width));
  };
  write_parts_together(unit, component, begin, elements, zero, [&](const Part& part) {
    const bool zero_already = !on_device(part.chunk) && extent_of(part.chunk, component).empty();
    if (!zero_already) write_away(component, part, zero);
  });
}

void Access::write_piece(int32_t unit, Component component, int64_t begin, int64_t elements,
                         std::span<const std::byte> piece, int64_t piece_elements, int64_t skip) {
  const Unit& u = setup_.layout.units[unit];
  const int64_t width = u.component_element_bytes(component);
  const bool scaled = u.scaled(component);
  write_parts(unit, component, begin, elements, [&](std::byte* to, const Part& part) {
    std::memcpy(to + part.in_chunk * width, piece.data() + (skip + part.in_span) * width,
                static_cast<size_t>(part.elements * width));
    if (!scaled) return;
    const int64_t room = setup_.layout.chunks[part.chunk].elements;
    std::memcpy(to + room + part.in_chunk / optim::kScaleBlock,
                piece.data() + piece_elements + (skip + part.in_span) / optim::kScaleBlock,
                static_cast<size_t>((part.elements + optim::kScaleBlock - 1) / optim::kScaleBlock));
  });
}

std::vector<std::span<std::byte>> Access::at_home(int32_t unit, Component component, int64_t begin,
                                                  int64_t elements) {
  const int64_t width = setup_.layout.units[unit].component_element_bytes(component);
  std::vector<std::span<std::byte>> parts;
  bool all = true;
  for_each_part(unit, component, begin, elements, [&](const Part& part) {
    std::byte* const home = model_.chunks[part.chunk].home[static_cast<size_t>(component)];
    all = all && home != nullptr;
    if (all) parts.emplace_back(home + part.in_chunk * width, static_cast<size_t>(part.elements * width));
  });
  if (!all) parts.clear();
  return parts;
}

void Access::read_weights(int32_t unit, int64_t begin, std::span<float> values) {
  const auto elements = static_cast<int64_t>(values.size());
  WeightBuffers buffers(setup_.layout.units[unit], std::min(kPieceElements, elements));
  for (int64_t done = 0; done < elements; done += kPieceElements) {
    const int64_t count = std::min(kPieceElements, elements - done);
    for (size_t i = 0; i < buffers.count(); ++i)
      read(unit, Component{static_cast<uint8_t>(i)}, begin + done, buffers.bytes(i, count));
    buffers.load(values.subspan(static_cast<size_t>(done), static_cast<size_t>(count)));
  }
}

void Access::write_weights(int32_t unit, int64_t begin, std::span<const float> values) {
  const auto elements = static_cast<int64_t>(values.size());
  WeightBuffers buffers(setup_.layout.units[unit], std::min(kPieceElements, elements));
  for (int64_t done = 0; done < elements; done += kPieceElements) {
    const int64_t count = std::min(kPieceElements, elements - done);
    buffers.store(first(values, done, count));
    for (size_t i = 0; i < buffers.count(); ++i)
      write(unit, Component{static_cast<uint8_t>(i)}, begin + done, buffers.bytes(i, count));
  }
}

void Access::match_master(int32_t unit, int64_t begin, std::span<const std::byte> hi) {
  const Unit& u = setup_.layout.units[unit];
  if (!u.trainable() || u.components().size() < 2 || u.components()[1].role != optim::Role::master) return;
  const int64_t elements = static_cast<int64_t>(hi.size()) / u.element_bytes;
  if (*u.format != optim::Format::fp16) return clear(unit, kMaster, begin, elements);  // nothing is missing
  std::vector<optim::Fp16> halves(static_cast<size_t>(std::min(kPieceElements, elements)));
  std::vector<float> wide(halves.size());
  for (int64_t done = 0; done < elements; done += kPieceElements) {
    const auto count = static_cast<size_t>(std::min(kPieceElements, elements - done));
    std::memcpy(halves.data(), hi.data() + done * 2, count * 2);
    optim::widen(std::span<const optim::Fp16>(halves).first(count), std::span(wide).first(count));
    write(unit, kMaster, begin + done, std::as_bytes(std::span(wide).first(count)));
  }
}

void Access::read_state(int32_t unit, Component component, int64_t begin, std::span<float> values) {
  const Unit& u = setup_.layout.units[unit];
  read_parts(unit, component, begin, static_cast<int64_t>(values.size()),
             [&](std::byte* from, const Part& part) {
               const StatePiece state(u, component, from, setup_.layout.chunks[part.chunk].elements);
               optim::load_state(
                   u.optimizer, *u.format, state.piece(), {part.in_chunk, part.in_chunk + part.elements},
                   state.state(),
                   values.subspan(static_cast<size_t>(part.in_span), static_cast<size_t>(part.elements)));
             });
}

/// values_of(part, room): the part's values, of which some may lie in `room`. Beyond `elements` the last
/// block is filled up, so there may be more of them than were asked for.
template <class Values>
void Access::store_states(int32_t unit, Component component, int64_t begin, int64_t elements,
                          Values values_of) {
  const Unit& u = setup_.layout.units[unit];
  if (u.scaled(component)) {  // whole blocks
    elements = (elements + optim::kScaleBlock - 1) / optim::kScaleBlock * optim::kScaleBlock;
  }
  std::vector<float> room;
  write_parts(unit, component, begin, elements, [&](std::byte* to, const Part& part) {
    const std::span<const float> values = values_of(part, room);
    const StatePiece state(u, component, to, setup_.layout.chunks[part.chunk].elements);
    optim::store_state(u.optimizer, *u.format, state.piece(), {part.in_chunk, part.in_chunk + part.elements},
                       state.state(), values);
  });
}

void Access::fill_state(int32_t unit, Component component, int64_t begin, int64_t elements, float value) {
  store_states(unit, component, begin, elements, [&](const Part& part, std::vector<float>& room) {
    room.assign(static_cast<size_t>(part.elements), value);
    return std::span<const float>(room);
  });
}

void Access::write_state(int32_t unit, Component component, int64_t begin, std::span<const float> values) {
  const auto given = static_cast<int64_t>(values.size());
  store_states(unit, component, begin, given, [&](const Part& part, std::vector<float>& room) {
    const int64_t count = std::min(part.elements, given - part.in_span);
    const std::span<const float> own = first(values, part.in_span, count);
    if (count == part.elements) return own;
    room.assign(own.begin(), own.end());
    room.resize(static_cast<size_t>(part.elements));  // what fills the last block up is zero
    return std::span<const float>(room);
  });
}

std::span<std::byte> Access::scratch_of(int32_t chunk, Component component) {
  return scratch_.span().first(static_cast<size_t>(setup_.component_bytes(chunk, component)));
}

void Access::load(int32_t chunk, Component component) {
  if (on_device(chunk)) {
    const MutexLock lock(core_.mutex());
    core_.check();
    return device_units_.read(chunk, component, scratch_of(chunk, component));
  }
  io::Extent extent = extent_of(chunk, component);
  if (extent.empty()) {
    std::memset(scratch_.data(), 0, static_cast<size_t>(setup_.component_bytes(chunk, component)));
    return;
  }
  const StoreGate::Kept kept(core_.store);
  transfer(io::Transfer::Kind::read, extent);
}

void Access::store(int32_t chunk, Component component) {
  if (on_device(chunk)) {
    const MutexLock lock(core_.mutex());
    core_.check();
    return device_units_.write(chunk, component, scratch_of(chunk, component));
  }
  const StoreGate::Kept kept(core_.store);
  io::Extent fresh = core_.store->allocate(setup_.component_bytes(chunk, component));
  try {
    transfer(io::Transfer::Kind::write, fresh);
  } catch (...) {
    core_.store->release(fresh);
    throw;
  }
  const MutexLock lock(core_.mutex());
  io::Extent& extent = model_.chunks[chunk].extents[static_cast<size_t>(component)];
  if (!extent.empty()) core_.store->release(extent);
  extent = fresh;
}

bool Access::take(int32_t chunk, Component component, const io::Extent& extent) {
  const StoreGate::Kept kept(core_.store);
  const MutexLock lock(core_.mutex());
  io::Extent& own = model_.chunks[chunk].extents[static_cast<size_t>(component)];
  if (own == extent) return true;
  if (!core_.store->reclaim(extent)) return false;
  if (!own.empty()) core_.store->release(own);
  own = extent;
  return true;
}

void Access::transfer(io::Transfer::Kind kind, io::Extent& extent) {
  if (extent.bytes > scratch_.bytes()) throw std::logic_error("an extent is larger than the scratch buffer");
  io::Transfer transfer;
  transfer.kind = kind;
  transfer.priority = io::Transfer::Priority::demand;
  transfer.extent = extent;
  transfer.memory = scratch_.data();
  io::transfer_now(*core_.store, transfer);
  extent = transfer.extent;
  if (!transfer.error) return;
  // What a disk may still write into the scratch buffer must not be used again.
  if (core_.store->kernel_keeps_memory()) {
    const MutexLock guard(core_.mutex());
    core_.fail(transfer.error->message());
  }
  throw io::StoreError(*transfer.error);
}

}  // namespace overspill::engine
