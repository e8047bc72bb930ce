#include "engine/gradients/gradient_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cpu_optim/elements.h"

namespace overspill::engine {
namespace {

using optim::span_of;

constexpr int64_t kPoolAlign = 4096;
constexpr int64_t kSumBytes = sizeof(float);

}  // namespace

GradientSums::GradientSums(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model,
                           RankGroups& ranks, DeviceUnits& device_units)
    : setup_(setup),
      core_(core),
      hardware_(hardware),
      model_(model),
      ranks_(ranks),
      device_units_(device_units),
      device_(setup, hardware),
      pool_memory_(hardware.device(), hardware.host_budget, setup.plan.pool_host_bytes(),
                   "gradients until they are summed"),
      pool_(setup.plan.gradient_pool_bytes, kPoolAlign),
      exchange_(hardware.device(), hardware.host_budget, setup.plan.exchange_bytes,
                "gradients exchanged between ranks"),
      of_(setup.layout.units.size()),
      send_(static_cast<size_t>(setup.layout.slices)),
      receive_(static_cast<size_t>(setup.layout.slices)) {
  if (setup.layout.slices > 1 && setup.plan.units_on_device() > 0 && !device_.used())
    throw std::logic_error(
        "units of several ranks live on the device, and their gradients are not summed there");
  for (size_t u = 0; u < of_.size(); ++u) {
    const size_t segments = setup.layout.units[u].segments.size();
    of_[u].held.resize(segments);
    of_[u].arrivals.resize(segments);
    of_[u].expected.assign(segments, static_cast<int32_t>(setup.config.gradient_accumulation));
  }
}

/// Of what this rank has given, the part of `rank` from `in_slice` on.
const std::byte* GradientSums::slice_of(int32_t unit, int rank, int64_t in_slice) const {
  return model_.units[unit].gradients +
         (rank * setup_.layout.units[unit].slice_elements + in_slice) * setup_.gradient_width(unit);
}

void GradientSums::open(int32_t unit) {
  Given& own = of_[unit];
  if (own.summed && !setup_.plan.gradients_pooled) {
    throw std::invalid_argument(fmt::format(
        "a gradient of {} came after the ranks' gradients were summed (grad_norm(), clip_grad_norm()): bring "
        "all of a step's first, or call step() or clear_gradients()",
        setup_.layout.units[unit].name));
  }
  const auto done = [&]() REQUIRES(engine_mutex) { return may_open(unit); };
  if (!done()) {
    waits_for_ = unit;
    core_.changed.notify_all();
    try {
      core_.wait(done, Cause::room, unit);
    } catch (...) {
      waits_for_ = -1;
      throw;
    }
    waits_for_ = -1;
  }
  if (!must_wait(unit) && model_.units[unit].gradients == nullptr) take_memory(unit);
  check_refused(unit);
  // In the unit's own memory the last step's sum lies among the gradients, and its update may be reading it.
  if (setup_.lives_on_device(unit) && !setup_.plan.gradients_pooled)
    device_.arrive_after(device_units_.used(unit));
}

bool GradientSums::may_open(int32_t unit) const {
  return refused_ || !must_wait(unit);
}

bool GradientSums::stuck() const {
  return waits_for_ >= 0 && must_wait(waits_for_);
}

bool GradientSums::must_wait(int32_t unit) const {
  // What comes after all that was expected is summed by itself, whenever the first sum runs: which of the two
  // comes first must not matter.
  if (of_[unit].complete && of_[unit].gives) return true;
  return model_.units[unit].gradients == nullptr &&
         pool_.largest_free_run() < setup_.layout.units[unit].elements * setup_.gradient_width(unit);
}

void GradientSums::check_refused(int32_t unit) {
  const bool refused = std::exchange(refused_, false);  // of this caller, and of no later one
  if (!refused || (model_.units[unit].gradients != nullptr && !must_wait(unit))) return;
  throw BudgetError(fmt::format(
      "no room for the gradient of {}: {} bytes of gradients wait for ranks that do not use these units now, "
      "and no rank can go on. Raise the host budget or prefetch_units, or use stage 1, where gradients are "
      "held whole",
      setup_.layout.units[unit].name, setup_.plan.gradient_pool_bytes - pool_.free_bytes()));
}

/// There is room: must_wait() says so.
void GradientSums::take_memory(int32_t unit) {
  const int64_t bytes = setup_.layout.units[unit].elements * setup_.gradient_width(unit);
  of_[unit].offset = pool_.allocate(bytes, RangeAllocator::End::low).value();
  model_.units[unit].gradients = pool() + of_[unit].offset;
}

void GradientSums::free_memory(int32_t unit) {
  Given& own = of_[unit];
  if (own.offset < 0) return;
  if (setup_.config.poison) {
    const int64_t bytes = setup_.layout.units[unit].elements * setup_.gradient_width(unit);
    if (are_on_device(unit)) {
      hardware_.device().poison(pool() + own.offset, bytes);
    } else {
      std::memset(pool() + own.offset, 0xFF, static_cast<size_t>(bytes));
    }
  }
  pool_.release(own.offset);
  own.offset = -1;
  model_.units[unit].gradients = nullptr;
}

void GradientSums::arrived(int32_t unit, int32_t segment) {
  Given& own = of_[unit];
  own.held[segment] = 1;
  own.gives = true;
  ++own.arrivals[segment];
  if (!setup_.plan.gradients_pooled || own.summed) return;  // a further sum is step()'s
  own.complete = true;
  for (size_t s = 0; s < own.arrivals.size(); ++s)
    own.complete = own.complete && own.arrivals[s] >= own.expected[s];
  if (own.complete) core_.changed.notify_all();
}

void GradientSums::summed(int32_t unit) {
  Given& own = of_[unit];
  own.gives = own.complete = false;
  own.summed = true;
  std::fill(own.held.begin(), own.held.end(), uint8_t{0});
  free_memory(unit);
  core_.changed.notify_all();
}

float GradientSums::factor() const {
  return setup_.config.sum_over_ranks ? 1.0F : 1.0F / static_cast<float>(setup_.layout.slices);
}

void GradientSums::restart() {
  for (size_t u = 0; u < of_.size(); ++u) {
    Given& own = of_[u];
    free_memory(static_cast<int32_t>(u));
    // Never fewer than were seen: waiting for step() is right, a sum too early is one more sum.
    for (size_t s = 0; s < own.arrivals.size(); ++s)
      own.expected[s] = std::max(own.expected[s], own.arrivals[s]);
    std::fill(own.arrivals.begin(), own.arrivals.end(), 0);
    std::fill(own.held.begin(), own.held.end(), uint8_t{0});
    own.gives = own.complete = own.summed = false;
  }
}

bool GradientSums::lacks(int32_t unit, int32_t segment) {
  const MutexLock lock(core_.mutex());
  return !holds(unit, segment);
}

bool GradientSums::is_first_sum(int32_t unit) {
  const MutexLock lock(core_.mutex());
  return !has_sum(unit);
}

void GradientSums::zero_absent(int32_t unit) {
  const Unit& u = setup_.layout.units[unit];
  for (size_t s = 0; s < u.segments.size(); ++s) {
    if (u.segments[s].elements == 0 || !lacks(unit, static_cast<int32_t>(s))) continue;
    const int64_t width = setup_.gradient_width(unit);
    std::byte* const absent = model_.units[unit].gradients + u.segments[s].begin * width;
    const int64_t bytes = u.segments[s].elements * width;
    if (are_on_device(unit)) {
      device_.clear(absent, bytes);
    } else {
      std::memset(absent, 0, static_cast<size_t>(bytes));
    }
  }
}

void GradientSums::sum(int32_t unit, std::span<const uint8_t> gives) {
  const Layout& layout = setup_.layout;
  const Unit& u = layout.units[unit];
  if (gives[layout.slice] != 0) zero_absent(unit);
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (layout.chunks[c].slice == layout.slice) sum_chunk(c, gives);
  }
  if (setup_.lives_on_device(unit)) square_there(unit);
  if (layout.policy.divide_states) return;
  // Every rank updates everything: the sums go to all.
  const auto bytes = static_cast<size_t>(u.slice_elements * setup_.gradient_width(unit));
  for (int rank = 0; rank < layout.slices; ++rank) {
    send_[rank] = std::span(model_.units[unit].gradients + layout.slice * bytes, bytes);
    receive_[rank] = std::span(model_.units[unit].gradients + rank * bytes, bytes);
  }
  ranks_.communicator->exchange(send_, receive_);
}

void GradientSums::square_there(int32_t unit) {
  const MutexLock lock(core_.mutex());
  core_.wait_for(device_units_.square_sums(unit));
}

void GradientSums::sum_chunk(int32_t c, std::span<const uint8_t> gives) {
  const Layout& layout = setup_.layout;
  const Chunk& chunk = layout.chunks[c];
  const int32_t unit = chunk.unit;
  const optim::Element type = setup_.gradient_type(unit);
  const int64_t in_slice = layout.global_begin(chunk) - layout.slice * layout.units[unit].slice_elements;
  const bool there = are_on_device(unit), first = is_first_sum(unit);
  if (there) add_on_device(unit, in_slice, chunk.elements, gives);
  if (setup_.lives_on_device(unit)) {
    kernels::Event used;
    {
      const MutexLock guard(core_.mutex());
      used = device_units_.used(unit);
    }
    return device_.take_mean(factor(), type, device_units_.place_of_gradient(c), chunk.elements, first, used);
  }
  const int64_t parts = there ? 0 : layout.slices + 1;  // before the sum
  const auto sum = span_of<float>(exchange_.data() + parts * chunk.elements * kSumBytes, chunk.elements);
  if (there) {
    device_.fetch(sum);
  } else if (setup_.config.library_sums) {
    add_by_the_transport(unit, in_slice, sum, gives[layout.slice] != 0);
  } else {
    add_in_rank_order(unit, in_slice, sum, gives);
  }
  optim::scale(sum, factor());
  std::byte* const to = model_.chunks[c].gradient;
  if (!first) widen(type, to, sum, false);
  narrow(type, sum, to);
}

/// What goes to whom of this slice's elements, and where it comes to: rank by rank in `room`.
void GradientSums::choose_slices(int32_t unit, int64_t in_slice, int64_t elements, std::span<std::byte> room,
                                 std::span<const uint8_t> gives) {
  const Layout& layout = setup_.layout;
  const auto bytes = static_cast<size_t>(elements * setup_.gradient_width(unit));
  for (int rank = 0; rank < layout.slices; ++rank) {
    const bool other = rank != layout.slice;
    send_[rank] = other && gives[layout.slice] != 0 ? std::span(slice_of(unit, rank, in_slice), bytes)
                                                    : std::span<const std::byte>();
    receive_[rank] = other && gives[rank] != 0 ? room.subspan(static_cast<size_t>(rank) * bytes, bytes)
                                               : std::span<std::byte>();
  }
}

void GradientSums::add_on_device(int32_t unit, int64_t in_slice, int64_t elements,
                                 std::span<const uint8_t> gives) {
  choose_slices(unit, in_slice, elements, device_.exchange(), gives);
  ranks_.communicator->exchange_on_device(send_, receive_);
  bool first = true;
  for (int rank = 0; rank < setup_.layout.slices; ++rank) {
    if (gives[rank] == 0) continue;
    const bool own = rank == setup_.layout.slice;
    device_.add(setup_.gradient_type(unit), own ? slice_of(unit, rank, in_slice) : receive_[rank].data(),
                elements, first);
    first = false;
  }
}

void GradientSums::add_in_rank_order(int32_t unit, int64_t in_slice, std::span<float> sum,
                                     std::span<const uint8_t> gives) {
  choose_slices(unit, in_slice, std::ssize(sum), exchange_.span(), gives);
  ranks_.communicator->exchange(send_, receive_);
  bool first = true;
  for (int rank = 0; rank < setup_.layout.slices; ++rank) {
    if (gives[rank] == 0) continue;
    const bool own = rank == setup_.layout.slice;
    widen(setup_.gradient_type(unit), own ? slice_of(unit, rank, in_slice) : receive_[rank].data(), sum,
          first);
    first = false;
  }
}

/// Its slices have to lie side by side, and a rank that has nothing sends zeros.
void GradientSums::add_by_the_transport(int32_t unit, int64_t in_slice, std::span<float> sum, bool gives) {
  const int slices = setup_.layout.slices;
  const size_t bytes = sum.size() * static_cast<size_t>(setup_.gradient_width(unit));
  const auto all = exchange_.span().first(static_cast<size_t>(slices) * bytes);
  const auto own = exchange_.span().subspan(static_cast<size_t>(slices) * sum.size_bytes(), bytes);
  for (int rank = 0; rank < slices; ++rank) {
    std::byte* const to = all.data() + static_cast<size_t>(rank) * bytes;
    if (gives) {
      std::memcpy(to, slice_of(unit, rank, in_slice), bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
  ranks_.communicator->reduce_scatter_sum(all, own, setup_.gradient_type(unit));
  widen(setup_.gradient_type(unit), own.data(), sum, true);
}

}  // namespace overspill::engine
