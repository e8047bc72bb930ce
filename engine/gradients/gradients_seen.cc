// What is asked of gradients (gradients.h): their norm, whether they are finite, their values.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>

#include "cpu_optim/elements.h"
#include "cpu_optim/gradient.h"
#include "engine/gradients/gradients.h"

namespace overspill::engine {
namespace {

constexpr int64_t kReadElements = 512 * 1024;  // at a time, where a gradient is only looked at

}  // namespace

optim::Squares Gradients::squares_of_run(int32_t chunk, size_t run) const {
  const Chunk& c = setup_.layout.chunks[chunk];
  if (const auto known = squares_.of(chunk, run)) return *known;
  const std::byte* data = model_.chunks[chunk].gradient;
  if (data == nullptr) throw std::logic_error("nobody has squared a gradient that is not in memory");
  return optim::squares_of(data + c.runs[run].begin * setup_.gradient_width(c.unit), c.runs[run].elements,
                           setup_.gradient_type(c.unit));
}

std::optional<double> Gradients::factor_of(int32_t unit, int32_t segment) {
  const MutexLock lock(core_.mutex());
  if (!is_there(unit, segment)) return std::nullopt;
  return factor(unit, segment);
}

optim::Squares Gradients::squares_of_chunk(int32_t chunk) {
  const Chunk& c = setup_.layout.chunks[chunk];
  optim::Squares total;
  for (size_t r = 0; r < c.runs.size(); ++r) {
    const int32_t segment = c.runs[r].segment;
    const std::optional<double> scale = factor_of(c.unit, segment);
    if (!scale) continue;
    const optim::Squares part = squares_of_run(chunk, r);
    if (setup_.layout.units[c.unit].segments[segment].in_norm)
      total.sum += *scale == 1.0 ? part.sum : part.sum * *scale * *scale;
    total.finite = total.finite && part.finite;
  }
  return total;
}

GradientSummary Gradients::summarize() {
  const Layout& layout = setup_.layout;
  const auto chunks = static_cast<int64_t>(layout.chunks.size());
  {
    const MutexLock lock(core_.mutex());
    squares_.fetch();
  }
  hardware_.executor->parallel_for(
      chunks, [&](int64_t c) { by_chunk_[c] = squares_of_chunk(static_cast<int32_t>(c)); });
  // Slice by slice, in rank order, wherever they are: squares, chunks that are not finite.
  auto& slices = by_slice_;
  std::fill(slices.begin(), slices.end(), std::array<double, 2>{});
  for (int64_t i = 0; i < chunks; ++i) {
    auto& slice = slices[layout.shards == 1 ? static_cast<size_t>(layout.chunks[i].slice) : 0];
    slice[0] += by_chunk_[i].sum;
    slice[1] += by_chunk_[i].finite ? 0 : 1;
  }
  std::array<double, 2> sums = slices[0];
  for (size_t s = 1; s < slices.size(); ++s) {
    for (size_t k = 0; k < 2; ++k) sums[k] += slices[s][k];
  }
  if (layout.shards > 1) ranks_.communicator->all_reduce_sum(sums);
  if (ranks_.model_ranks != nullptr) ranks_.model_ranks->all_reduce_sum(sums);
  const bool finite = sums[1] == 0;
  return {finite ? sums[0] : std::numeric_limits<double>::infinity(), finite};
}

std::string Gradients::first_not_finite() {
  const auto bad = std::find_if(by_chunk_.begin(), by_chunk_.end(),
                                [](const optim::Squares& squares) { return !squares.finite; });
  if (bad == by_chunk_.end()) return {};
  const auto chunk = static_cast<int32_t>(bad - by_chunk_.begin());
  const Chunk& c = setup_.layout.chunks[chunk];
  for (size_t r = 0; r < c.runs.size(); ++r) {
    const int32_t segment = c.runs[r].segment;
    if (factor_of(c.unit, segment) && !squares_of_run(chunk, r).finite)
      return setup_.layout.units[c.unit].segments[segment].name;
  }
  return {};
}

bool Gradients::any_nan() {
  std::vector<float> values(static_cast<size_t>(kReadElements));
  for (int32_t u = 0; u < std::ssize(setup_.layout.units); ++u) {
    const auto& segments = setup_.layout.units[u].segments;
    for (int32_t s = 0; s < std::ssize(segments); ++s) {
      if (!factor_of(u, s)) continue;
      const int64_t elements = segments[s].elements;
      for (int64_t begin = 0; begin < elements; begin += kReadElements) {
        const auto piece =
            std::span(values).first(static_cast<size_t>(std::min(kReadElements, elements - begin)));
        read(u, s, begin, piece);
        if (std::any_of(piece.begin(), piece.end(), [](float value) { return std::isnan(value); }))
          return true;
      }
    }
  }
  return false;
}

void Gradients::read(int32_t unit, int32_t segment, int64_t begin, std::span<float> out) {
  const Segment& s = setup_.layout.units[unit].segments[segment];
  const int64_t end = begin + std::ssize(out);
  if (begin < 0 || end > s.elements) {
    throw std::invalid_argument(
        fmt::format("{} has {} elements: there are none from {} to {}", s.name, s.elements, begin, end));
  }
  const auto [there, scale] = [&] {
    const MutexLock lock(core_.mutex());
    return std::pair(presence(unit, segment), factor(unit, segment));
  }();
  if (there < Presence::zero) throw std::invalid_argument(fmt::format("{} has no gradient now", s.name));
  if (there == Presence::zero) {
    std::ranges::fill(out, 0.0F);
    return;
  }
  read_unscaled(unit, segment, begin, out);
  if (scale != 1.0) optim::scale(out, static_cast<float>(scale));
}

void Gradients::read_unscaled(int32_t unit, int32_t segment, int64_t begin, std::span<float> out) {
  const Segment& s = setup_.layout.units[unit].segments[segment];
  const int64_t end = begin + std::ssize(out);
  const int64_t width = setup_.gradient_width(unit);
  if (setup_.lives_on_device(unit)) {
    std::vector<std::byte> there(out.size() * static_cast<size_t>(width));
    {
      const MutexLock lock(core_.mutex());
      device_units_.read_gradient(unit, segment, begin, there);
    }
    return widen(setup_.gradient_type(unit), there.data(), out, true);
  }
  if (model_.units[unit].gradients != nullptr)
    return widen(setup_.gradient_type(unit), at(unit, s.begin + begin), out, true);
  const MutexLock turn(turn_);
  const MutexLock lock(core_.mutex());
  for_each_part(unit, segment, [&](const Part& part) {
    core_.mutex().assume_held();  // for_each_part() knows nothing of it
    turn_.assume_held();
    const int64_t from = std::max(begin, part.in_segment);
    const int64_t to = std::min(end, part.in_segment + part.elements);
    if (from >= to) return;
    const ChunkState& state = model_.chunks[part.chunk];
    const std::byte* data = state.gradient;
    if (state.gradient == nullptr) {
      data = staging_.open(part.chunk);
      staging_.wait(part.chunk);
    }
    const int64_t in_chunk = part.in_chunk + from - part.in_segment;
    const optim::Element element = state.gradient_element;
    {
      const Unlocked unlocked(core_.mutex());  // `out` may be new memory; whoever changes these takes turn_
      widen(element, data + in_chunk * optim::bytes(element),
            out.subspan(static_cast<size_t>(from - begin), static_cast<size_t>(to - from)), true);
    }
    if (state.gradient == nullptr) staging_.close(part.chunk, GradientStaging::Closing::unchanged);
  });
}

void Gradients::apply_factor(int32_t unit, int32_t segment) {
  const auto scale = static_cast<float>(factor_of(unit, segment).value_or(1.0));
  if (scale == 1.0F) return;
  const Arrival whole{unit, segment, setup_.gradient_type(unit), /*first=*/true};
  const int64_t elements = setup_.layout.units[unit].segments[segment].elements;
  std::vector<float> values;
  std::vector<std::byte> scaled;
  try {
    for (int64_t begin = 0; begin < elements;) {
      const int64_t end = piece_end(whole, begin);
      values.resize(static_cast<size_t>(end - begin));
      scaled.resize(values.size() * sizeof(float));
      read_unscaled(unit, segment, begin, values);
      optim::scale(std::span(values), scale);
      narrow(whole.element, values, scaled.data());
      add(whole, begin, end - begin, scaled.data());
      begin = end;
    }
  } catch (const std::exception& error) {  // a part of it is scaled
    const MutexLock guard(core_.mutex());
    core_.fail(fmt::format("clipping gradients of {}: {}", setup_.layout.units[unit].name, error.what()));
    core_.check();
  }
  const MutexLock guard(core_.mutex());
  factors_[unit][segment] = 1.0;
}

}  // namespace overspill::engine
