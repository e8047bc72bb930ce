#include "engine/device/device_units.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/device/device_gradients.h"

namespace overspill::engine {
DeviceUnits::DeviceUnits(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model,
                         GradientSquares& squares)
    : setup_(setup), core_(core), model_(model), squares_(squares) {
  if (setup.plan.units_on_device() == 0) return;
  kernels::Device& device = hardware.device();
  kernels_ = device.kernels();
  memory_ = device.allocate(setup.plan.units_device_bytes);
  stream_ = device.make_stream();
  std::byte* next = memory_.data();
  const auto take = [&](int64_t bytes) { return std::exchange(next, next + bytes); };
  residents_.resize(setup.layout.units.size());
  for (const Chunk& chunk : setup.layout.chunks) piece_elements_ = std::max(piece_elements_, chunk.elements);
  for (size_t u = 0; u < residents_.size(); ++u) {
    if (!setup.lives_on_device(static_cast<int32_t>(u))) continue;
    const Unit& unit = setup.layout.units[u];
    Resident& resident = residents_[u];
    for (Component component : kAllComponents) {
      int64_t bytes = 0;
      for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c)
        bytes += setup.component_bytes(c, component);
      resident.components[static_cast<size_t>(component)] = take(bytes);
    }
    const int64_t width = setup.gradient_width(static_cast<int32_t>(u));
    if (setup.plan.gradients_pooled) {
      resident.gradients = take(unit.shard_elements * width);
    } else {  // of all ranks' elements, among them those of the shard
      std::byte* const all = take(unit.elements * width);
      resident.gradients = all + setup.layout.shard * unit.shard_elements * width;
      if (setup.layout.slices > 1) model.units[u].gradients = all;
    }
    resident.block.unit = static_cast<int32_t>(u);
    resident.block.device = resident.components[0];
    model.units[u].on_device = &resident.block;
  }
  if (setup.layout.slices > 1) piece_elements_ = 0;  // gradients from the host come in where they are summed
  piece_ = take(piece_elements_ * 4);
  if (next > memory_.data() + memory_.bytes())
    throw std::logic_error("units on the device take more than was planned");
  try {
    kernels_->clear(*stream_, memory_.data(), memory_.bytes());
    for (Resident& resident : residents_) resident.block.copied = stream_->record();
  } catch (...) {
    settle();  // the memory is about to be freed
    throw;
  }
}

DeviceUnits::~DeviceUnits() {
  if (stream_ == nullptr) return;
  try {
    for (Resident& resident : residents_) wait_for_uses(resident.block);
  } catch (const std::exception&) {  // as in settle()
  }
  settle();
}

void DeviceUnits::settle() noexcept {
  engine::settle(stream_.get());
}

Block* DeviceUnits::lease(int32_t unit) {
  Block& block = residents_[unit].block;
  ++block.leases;
  return &block;
}

// ---- gradients

std::byte* DeviceUnits::gradient_of(int32_t unit, int32_t segment) {
  const Unit& u = setup_.layout.units[unit];
  const int64_t begin = u.segments[segment].begin - setup_.layout.shard * u.shard_elements;
  return residents_[unit].gradients + begin * setup_.gradient_width(unit);
}

kernels::Event DeviceUnits::take_in(const Arrival& arrival, const std::byte* data,
                                    const kernels::Event& ready) {
  stream_->wait(ready);
  kernels_->take_in(*stream_, arrival.element, data, setup_.gradient_type(arrival.unit),
                    gradient_of(arrival.unit, arrival.segment),
                    setup_.layout.units[arrival.unit].segments[arrival.segment].elements, arrival.first);
  take_squares(arrival.unit, arrival.segment);
  return stream_->record();
}

void DeviceUnits::take_in(const Arrival& arrival, int64_t begin, int64_t elements, const std::byte* data) {
  {
    // Nobody else submits to the stream meanwhile: gradients come one at a time (GradientIntake), and step()
    // and looks from outside not beside them.
    const Unlocked unlocked(core_.mutex());
    take_in_from_host(
        *kernels_, *stream_, {piece_, static_cast<size_t>(piece_elements_ * 4)}, arrival.element, data,
        setup_.gradient_type(arrival.unit),
        gradient_of(arrival.unit, arrival.segment) + begin * setup_.gradient_width(arrival.unit), elements,
        arrival.first);
  }
  take_squares(arrival.unit, arrival.segment);
  wait(stream_->record());
}

void DeviceUnits::read_gradient(int32_t unit, int32_t segment, int64_t begin, std::span<std::byte> out) {
  {
    // Nobody else submits to the stream meanwhile: the engine's caller makes no other call that would.
    const Unlocked unlocked(core_.mutex());
    stream_->copy_to_host(out.data(), gradient_of(unit, segment) + begin * setup_.gradient_width(unit),
                          std::ssize(out));
  }
  wait(stream_->record());
}

std::byte* DeviceUnits::place_of_gradient(int32_t chunk) const {
  const Chunk& c = setup_.layout.chunks[chunk];
  return residents_[c.unit].gradients + c.begin * setup_.gradient_width(c.unit);
}

kernels::Event DeviceUnits::square_sums(int32_t unit) {
  kernels::Event squared;
  if (!squares_.taken_there(unit)) return squared;  // a rank may have nothing but padding
  for (int32_t s = 0; s < std::ssize(setup_.layout.units[unit].segments); ++s)
    squared = squares_.take_there({}, unit, s, setup_.gradient_type(unit), gradient_of(unit, s));
  return squared;
}

void DeviceUnits::take_squares(int32_t unit, int32_t segment) {
  squares_.take_there(*stream_, unit, segment, setup_.gradient_type(unit), gradient_of(unit, segment));
}

// ---- the update

void DeviceUnits::wait_for_uses(Block& block) {
  for (const kernels::Event& use : block.uses) stream_->wait(use);
  block.uses.clear();
  // Of leases that are held yet: what they were given until now.
  for (kernels::Stream* user : block.users) stream_->wait(user->record());
}

void DeviceUnits::update(int32_t unit) {
  const Unit& u = setup_.layout.units[unit];
  Resident& resident = residents_[unit];
  // For the host they are done: what comes next is in the device's hands.
  core_.journal.note(Happening::scheduled, unit);
  core_.journal.note(Happening::updated, unit);
  try {
    wait_for_uses(resident.block);
    const kernels::Event begin = core_.journal.begin(*stream_);
    // Scales lie behind a chunk's codes; without any the chunks of a shard are one array.
    const bool scaled =
        std::ranges::any_of(u.components(), [](const optim::ComponentSpec& spec) { return spec.scaled; });
    if (!scaled) update_piece(u.first_chunk, u.shard_elements);
    for (int32_t c = u.first_chunk; scaled && c < u.first_chunk + u.chunk_count; ++c)
      update_piece(c, setup_.layout.chunks[c].elements);
    resident.block.copied = stream_->record();
    core_.journal.note(DeviceSpan::Kind::update, unit, begin, resident.block.copied);
  } catch (const kernels::DeviceError& error) {
    core_.fail(fmt::format("updating {} on the device: {}", u.name, error.what()));
  }
}

/// So many elements of the shard, from the chunk's first on.
void DeviceUnits::update_piece(int32_t chunk, int64_t elements) {
  const Chunk& c = setup_.layout.chunks[chunk];
  const Unit& u = setup_.layout.units[c.unit];
  const UnitState& state = model_.units[c.unit];
  std::array<std::byte*, kComponents> components{};
  for (Component component : kAllComponents)
    components[static_cast<size_t>(component)] = place_of(chunk, component);
  const optim::Piece piece{.components = std::span(components).first(u.components().size()),
                           .elements = elements,
                           .index = setup_.layout.global_begin(c),
                           .seed = setup_.rounding_seed(c.unit)};
  const optim::Gradient gradient{place_of_gradient(chunk), setup_.gradient_type(c.unit)};
  for (size_t s = 0; s < u.segments.size(); ++s) {
    const int64_t first = u.segments[s].begin - piece.index;
    const optim::Range own{std::max<int64_t>(first, 0), std::min(first + u.segments[s].elements, elements)};
    if (state.updated[s] == 0 || own.begin >= own.end) continue;
    kernels_->update(*stream_, *u.format, piece, gradient, own, state.factors[s]);
  }
}

void DeviceUnits::finish() {
  if (stream_ != nullptr) wait(stream_->record());
}

// ---- access from outside

std::byte* DeviceUnits::place_of(int32_t chunk, Component component) const {
  const int32_t unit = setup_.layout.chunks[chunk].unit;
  const int32_t first = setup_.layout.units[unit].first_chunk;  // all but the last are as long
  return residents_[unit].components[static_cast<size_t>(component)] +
         (chunk - first) * setup_.component_bytes(first, component);
}

void DeviceUnits::read(int32_t chunk, Component component, std::span<std::byte> to) {
  stream_->copy_to_host(to.data(), place_of(chunk, component), std::ssize(to));
  wait(stream_->record());
}

void DeviceUnits::write(int32_t chunk, Component component, std::span<const std::byte> from) {
  Block& block = residents_[setup_.layout.chunks[chunk].unit].block;
  // Weights are leased and sent to other ranks, which wait for `copied`; states are this stream's alone, and
  // whoever writes one may do so while the weights beside it are being sent.
  const bool weights = component == Component::hi;
  if (weights) wait_for_uses(block);
  stream_->copy_from_host(place_of(chunk, component), from.data(), std::ssize(from));
  const kernels::Event written = stream_->record();
  if (weights) block.copied = written;
  wait(written);
}

void DeviceUnits::wait(const kernels::Event& event) {
  try {
    core_.wait_for(event);
  } catch (const kernels::DeviceError& error) {
    core_.fail(fmt::format("units on the device: {}", error.what()));
    core_.check();
  }
}

}  // namespace overspill::engine
