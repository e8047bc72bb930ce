// One segment's gradient of several ranks, as the next step would use it: looked at, or set, between passes.
// What was summed already lies in shards; the rest, which each rank holds of its own passes, is summed here
// into a copy, and stays where it is for the step.
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "cpu_optim/elements.h"
#include "engine/calls/machine.h"
#include "engine/weights/access.h"

namespace overspill::engine {
void Machine::require_gradients_on_host(int32_t unit) {
  if (!gradients.sums().are_on_device(unit) && !setup.lives_on_device(unit)) return;
  throw std::invalid_argument(
      fmt::format("gradients of {} are summed on the device, of several ranks: none is read or set there",
                  setup.layout.units[unit].name));
}

std::vector<double> Machine::holders(int32_t unit, int32_t segment) {
  std::vector<double> said(static_cast<size_t>(setup.layout.slices) + 1);
  {
    const MutexLock guard(core.mutex());
    said[setup.layout.slice] = gradients.sums().holds(unit, segment) ? 1 : 0;
    said.back() = gradients.present(unit, segment) ? 1 : 0;
  }
  ranks.communicator->all_reduce_sum(said);
  return said;
}

bool Machine::has_sum(int32_t unit) {
  const MutexLock lock(core.mutex());
  return gradients.sums().has_sum(unit);
}

std::byte* Machine::held_gradient(int32_t unit, int32_t segment, int64_t begin) const {
  const Segment& s = setup.layout.units[unit].segments[segment];
  return model.units[unit].gradients + (s.begin + begin) * setup.gradient_width(unit);
}

template <class Use>
void Machine::each_own_sum(int32_t unit, int32_t segment, Use use) const {
  const Part own = own_part(unit, segment);
  const int64_t width = setup.gradient_width(unit);
  for_each_run(setup.layout, unit, segment, [&](int32_t c, int32_t r, int64_t in_segment) {
    const Run& run = setup.layout.chunks[c].runs[r];
    const int64_t from = std::max(in_segment, own.begin);
    const int64_t to = std::min(in_segment + run.elements, own.begin + own.elements);
    if (from >= to) return;
    use(c, r, model.chunks[c].gradient + (run.begin + from - in_segment) * width, from, to - from);
  });
}

bool Machine::read_whole_gradient(int32_t unit, int32_t segment, std::span<float> out) {
  require_gradients_on_host(unit);
  intake.finish();
  bool found = false;
  rounds.meet(Meeting::look, ++looks, [&] {
    const std::vector<double> said = holders(unit, segment);
    found = said.back() > 0;
    if (!found) return;
    std::ranges::fill(out, 0.0F);
    if (has_sum(unit)) {
      each_own_sum(unit, segment, [&](int32_t, int32_t, const std::byte* sum, int64_t begin, int64_t count) {
        optim::widen(setup.gradient_type(unit), sum,
                     out.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)), true);
      });
      if (setup.layout.shards > 1) exchange_parts(unit, segment, std::as_writable_bytes(out), 4);
    }
    add_what_ranks_hold(unit, segment, said, out);
  });
  if (found && clipped) optim::scale(out, static_cast<float>(*clipped));
  return found;
}

/// To the bits of GradientSums::sum_chunk().
void Machine::add_what_ranks_hold(int32_t unit, int32_t segment, std::span<const double> said,
                                  std::span<float> out) {
  const Layout& layout = setup.layout;
  if (std::none_of(said.begin(), said.end() - 1, [](double holds) { return holds > 0; })) return;
  const optim::Element type = setup.gradient_type(unit);
  const int64_t width = setup.gradient_width(unit);
  const auto slices = static_cast<size_t>(layout.slices);
  std::vector<std::byte> room(slices * static_cast<size_t>(kPieceElements * width));
  std::vector<float> sum(static_cast<size_t>(kPieceElements));
  std::vector<std::span<const std::byte>> send(slices);
  std::vector<std::span<std::byte>> receive(slices);
  for (int64_t begin = 0; begin < std::ssize(out); begin += kPieceElements) {
    const int64_t count = std::min(kPieceElements, std::ssize(out) - begin);
    const auto bytes = static_cast<size_t>(count * width);
    const auto piece = std::span(sum).first(static_cast<size_t>(count));
    const std::byte* const own = said[layout.slice] > 0 ? held_gradient(unit, segment, begin) : nullptr;
    for (size_t rank = 0; rank < slices; ++rank) {
      const bool other = rank != static_cast<size_t>(layout.slice);
      send[rank] = other && own != nullptr ? std::span(own, bytes) : std::span<const std::byte>();
      receive[rank] =
          other && said[rank] > 0 ? std::span(room).subspan(rank * bytes, bytes) : std::span<std::byte>();
    }
    ranks.communicator->exchange(send, receive);
    bool first = true;
    for (size_t rank = 0; rank < slices; ++rank) {
      if (said[rank] == 0) continue;
      const bool other = rank != static_cast<size_t>(layout.slice);
      optim::widen(type, other ? receive[rank].data() : own, piece, first);
      first = false;
    }
    optim::scale(piece, gradients.sums().factor());
    for (size_t i = 0; i < piece.size(); ++i) piece[i] += out[static_cast<size_t>(begin) + i];
    optim::narrow(type, piece, room.data());
    optim::widen(type, room.data(), out.subspan(static_cast<size_t>(begin), piece.size()), true);
  }
}

bool Machine::replace_whole_gradient(int32_t unit, int32_t segment, std::span<const float> values) {
  require_gradients_on_host(unit);
  if (clipped) {
    throw std::invalid_argument(
        "a gradient of several ranks is set before clip_grad_norm(), whose factor counts for the whole step");
  }
  intake.finish();
  bool found = false;
  rounds.meet(Meeting::look, ++looks, [&] {
    const std::vector<double> said = holders(unit, segment);
    const bool summed = has_sum(unit);
    const auto of_ranks = std::span(said).first(said.size() - 1);
    const auto first = std::find_if(of_ranks.begin(), of_ranks.end(), [](double holds) { return holds > 0; });
    const bool any = first != of_ranks.end();
    found = said.back() > 0 && (any || summed);
    if (!found) return;
    const optim::Element type = setup.gradient_type(unit);
    const int64_t width = setup.gradient_width(unit);
    if (summed) {
      each_own_sum(unit, segment, [&](int32_t c, int32_t r, std::byte* sum, int64_t begin, int64_t count) {
        squares.forget(c, r);
        if (any) return std::fill_n(sum, count * width, std::byte{0}), void();
        optim::narrow(type, values.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)), sum);
      });
    }
    if (said[setup.layout.slice] == 0) return;
    // Such that the sum over the ranks, with its factor, is the value: each gives it, or one for all.
    const float factor = gradients.sums().factor();
    const bool all_give =
        factor != 1.0F && std::ranges::all_of(of_ranks, [](double holds) { return holds > 0; });
    const float times = all_give                                         ? 1.0F
                        : first - of_ranks.begin() == setup.layout.slice ? 1.0F / factor
                                                                         : 0.0F;
    std::vector<float> given(values.begin(), values.end());
    if (times != 1.0F) optim::scale(std::span(given), times);
    optim::narrow(type, given, held_gradient(unit, segment, 0));
  });
  return found;
}

bool Machine::read_own_gradient(int32_t unit, int32_t segment, std::span<float> out) {
  require_gradients_on_host(unit);
  if (setup.layout.slices > 1 && setup.plan.gradients_pooled) {
    throw std::invalid_argument(
        fmt::format("the gradient that this rank has given of {} is held at stages 0 and 1 alone",
                    setup.layout.units[unit].name));
  }
  intake.finish();
  {
    const MutexLock guard(core.mutex());
    if (gradients.sums().has_sum(unit)) {
      throw std::invalid_argument(
          fmt::format("gradients of {} were summed over the ranks already", setup.layout.units[unit].name));
    }
    if (!gradients.sums().holds(unit, segment)) return false;
  }
  // At these stages they are summed in a meeting alone, to which this caller would have to come.
  optim::widen(setup.gradient_type(unit), held_gradient(unit, segment, 0), out, true);
  return true;
}

}  // namespace overspill::engine
