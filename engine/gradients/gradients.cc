#include "engine/gradients/gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>

#include "cpu_optim/elements.h"
#include "cpu_optim/gradient.h"
#include "engine/base/engine_failed.h"
#include "engine/device/device_gradients.h"

namespace overspill::engine {
namespace {

using optim::span_of;

constexpr int64_t kSharedElements = 512 * 1024;  // of a gradient that several workers take in

/// Takes `elements` of a gradient in: the first of a step is copied, later ones are added. `to` is as wide as
/// `from`, or fp32.
void take_in(const std::byte* from, optim::Element from_element, std::byte* to, optim::Element to_element,
             int64_t elements, bool first) {
  if (from_element != to_element) return widen(from_element, from, span_of<float>(to, elements), first);
  if (first) {
    const auto bytes = static_cast<size_t>(elements * optim::bytes(to_element));
    return optim::copy_for_later({from, bytes}, {to, bytes});
  }
  optim::accumulate(to_element, from, to, elements);
}

std::optional<optim::Element> element_of(std::string_view dtype) {
  if (dtype == "BF16") return optim::Element::bf16;
  if (dtype == "F16") return optim::Element::fp16;
  if (dtype == "F32") return optim::Element::fp32;
  return std::nullopt;
}

void check_whole(const Unit& unit, GroupRange range) {
  const bool first = range.has(unit.segments.front().group);
  for (const Segment& segment : unit.segments) {
    if (range.has(segment.group) == first) continue;
    throw std::invalid_argument(
        fmt::format("groups {} to {} have a part of unit {} only: {} is in group {}, {} in group {}",
                    range.first, range.end - 1, unit.name, unit.segments.front().name,
                    unit.segments.front().group, segment.name, segment.group));
  }
}

/// To fp32, of an array of `from` that has room for it: from its end, block by block.
void widen_in_place(optim::Element from, std::byte* data, int64_t elements) {
  constexpr int64_t kBlock = 2048;
  std::array<std::byte, kBlock * 2> block;
  for (int64_t end = elements; end > 0;) {
    const int64_t begin = (end - 1) / kBlock * kBlock;
    const int64_t count = end - begin;
    std::memcpy(block.data(), data + begin * 2, static_cast<size_t>(count * 2));
    widen(from, block.data(), span_of<float>(data + begin * 4, count), true);
    end = begin;
  }
}

}  // namespace

Gradients::Gradients(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model,
                     RankGroups& ranks, DeviceUnits& device_units, GradientSquares& squares)
    : setup_(setup),
      core_(core),
      hardware_(hardware),
      model_(model),
      ranks_(ranks),
      device_units_(device_units),
      squares_(squares),
      accumulators_(setup, hardware),
      by_chunk_(model.chunks.size()),
      by_slice_(static_cast<size_t>(setup.layout.shards == 1 ? setup.layout.slices : 1)),
      staging_(setup, core, hardware, model),
      sums_(setup, core, hardware, model, ranks, device_units) {
  for (const Unit& unit : setup.layout.units) {
    presence_.emplace_back(unit.segments.size(), Presence::absent);
    factors_.emplace_back(unit.segments.size(), 1.0);
    arrivals_.emplace_back(unit.segments.size());
  }
}

Gradients::Only::Only(Gradients& gradients, GroupRange range) : gradients_(gradients), all_(range.all()) {
  if (all_) return;
  const MutexLock guard(gradients_.core_.mutex());
  for (const Unit& unit : gradients_.setup_.layout.units) {
    if (unit.trainable()) check_whole(unit, range);
  }
  gradients_.only_ = range;
  gradients_.aside_ = gradients_.presence_;
  for (size_t u = 0; u < gradients_.aside_.size(); ++u) {
    const auto& segments = gradients_.setup_.layout.units[u].segments;
    for (size_t s = 0; s < segments.size(); ++s) {
      auto& counts = range.has(segments[s].group) ? gradients_.aside_ : gradients_.presence_;
      counts[u][s] = Presence::absent;
    }
  }
}

Gradients::Only::~Only() {
  if (all_) return;
  const MutexLock guard(gradients_.core_.mutex());
  for (size_t u = 0; u < gradients_.aside_.size(); ++u) {
    for (size_t s = 0; s < gradients_.aside_[u].size(); ++s) {
      if (gradients_.aside_[u][s] != Presence::absent) gradients_.presence_[u][s] = gradients_.aside_[u][s];
    }
  }
  gradients_.aside_.clear();
  gradients_.only_ = {};
}

bool Gradients::is_aside(int32_t unit) const {
  return !aside_.empty() &&
         std::ranges::any_of(aside_[unit], [](Presence presence) { return presence != Presence::absent; });
}

std::byte* Gradients::at(int32_t unit, int64_t element) const {
  return model_.units[unit].gradients + element * setup_.gradient_width(unit);
}

optim::Element Gradients::check(int32_t unit, int32_t segment, std::string_view dtype) const {
  const Unit& u = setup_.layout.units[unit];
  const Segment& s = u.segments[segment];
  if (!u.trainable()) throw std::invalid_argument(fmt::format("{} is frozen: it takes no gradient", s.name));
  const std::optional<optim::Element> from_element = element_of(dtype);
  const optim::Element to_element = setup_.gradient_type(unit);
  if (!from_element || (from_element != to_element && to_element != optim::Element::fp32)) {
    throw std::invalid_argument(
        fmt::format("the gradient of {} is {}, its weights are {}", s.name, dtype, u.dtype));
  }
  return *from_element;
}

optim::Element Gradients::check(int32_t unit, int32_t segment, int64_t bytes, std::string_view dtype) const {
  const optim::Element element = check(unit, segment, dtype);
  const Segment& s = setup_.layout.units[unit].segments[segment];
  if (bytes != s.elements * optim::bytes(element)) {
    throw std::invalid_argument(fmt::format("the gradient of {} has {} bytes, its {} elements take {}",
                                            s.name, bytes, s.elements, s.elements * optim::bytes(element)));
  }
  return element;
}

Gradients::Arrival Gradients::begin(int32_t unit, int32_t segment, optim::Element element) {
  const MutexLock lock(core_.mutex());
  if (setup_.layout.slices > 1) sums_.open(unit);  // throws before anything has changed
  Arrival arrival{unit, segment, element, !is_there(unit, segment)};
  if (arrival.first) factors_[unit][segment] = 1.0;
  ++arrivals_[unit][segment];
  if (setup_.layout.slices > 1) arrival.first = !sums_.holds(unit, segment);
  return arrival;
}

bool Gradients::may_wait(int32_t unit) const {
  if (device_units_.take_gradients(unit)) return false;
  return setup_.layout.slices > 1 || setup_.gradient_route(unit) == GradientRoute::by_chunk;
}

int64_t Gradients::piece_end(const Arrival& arrival, int64_t begin) const {
  const Unit& u = setup_.layout.units[arrival.unit];
  const Segment& s = u.segments[arrival.segment];
  const int64_t chunk = setup_.layout.chunks[u.first_chunk].elements;  // all but the last are as long
  return std::min(s.elements, ((s.begin + begin) / chunk + 1) * chunk - s.begin);
}

std::byte* Gradients::place_of(const Arrival& arrival) const {
  const bool as_it_comes = arrival.first && arrival.element == setup_.gradient_type(arrival.unit);
  if (!as_it_comes || may_wait(arrival.unit) || device_units_.take_gradients(arrival.unit)) return nullptr;
  return at(arrival.unit, setup_.layout.units[arrival.unit].segments[arrival.segment].begin);
}

kernels::Event Gradients::square_there(const Arrival& arrival, const std::byte* data,
                                       const kernels::Event& ready) {
  if (squares_.taken_there(arrival.unit))
    return squares_.take_there(ready, arrival.unit, arrival.segment, arrival.element, data);
  forget_squares(arrival);
  return {};
}

std::optional<Gradients::TakenInThere> Gradients::take_in_there(const Arrival& arrival, const std::byte* data,
                                                                const kernels::Event& ready) {
  const Segment& s = setup_.layout.units[arrival.unit].segments[arrival.segment];
  if (device_units_.take_gradients(arrival.unit)) {
    const MutexLock guard(core_.mutex());
    return TakenInThere{.taken = device_units_.take_in(arrival, data, ready)};
  }
  if (sums_.are_on_device(arrival.unit)) {
    return TakenInThere{
        .taken = sums_.on_device().take_in(arrival.element, data, setup_.gradient_type(arrival.unit),
                                           at(arrival.unit, s.begin), s.elements, arrival.first, ready)};
  }
  bool last = false;
  {
    const MutexLock guard(core_.mutex());
    if (!accumulators_.takes(arrival)) return std::nullopt;
    last = is_last(arrival);
    if (last) accumulators_.brought_down(arrival.unit, arrival.segment);
  }
  TakenInThere there{.taken = accumulators_.take_in(arrival, data, ready)};
  if (!last) {
    forget_squares(arrival);
    return there;
  }
  there.sum = accumulators_.sum(arrival.unit, arrival.segment);
  there.home = at(arrival.unit, s.begin);
  there.squared = square_there({arrival.unit, arrival.segment, optim::Element::fp32}, there.sum, there.taken);
  return there;
}

void Gradients::forget_squares(const Arrival& arrival) {
  for_each_run(setup_.layout, arrival.unit, arrival.segment,
               [&](int32_t chunk, int32_t run, int64_t) { squares_.forget(chunk, run); });
}

/// As far as anybody knows: more may come, and are as right.
bool Gradients::is_last(const Arrival& arrival) const {
  return arrivals_[arrival.unit][arrival.segment] >= setup_.config.gradient_accumulation;
}

void Gradients::settle_there() noexcept {
  squares_.settle();
  accumulators_.settle();
  device_units_.settle();
  sums_.on_device().settle();
}

void Gradients::bring_down() {
  if (setup_.plan.accumulators_device_bytes == 0) return;
  std::vector<std::pair<int32_t, int32_t>> behind;
  {
    const MutexLock guard(core_.mutex());
    if (!core_.failure.empty()) return;
    for (int32_t u = 0; u < std::ssize(presence_); ++u) {
      for (int32_t segment = 0; segment < std::ssize(presence_[u]); ++segment) {
        if (!accumulators_.ahead(u, segment)) continue;
        behind.emplace_back(u, segment);
        accumulators_.brought_down(u, segment);
      }
    }
  }
  if (behind.empty()) return;
  try {
    for (const auto& [u, segment] : behind) {
      const Segment& s = setup_.layout.units[u].segments[segment];
      accumulators_.stream().copy_to_host(at(u, s.begin), accumulators_.sum(u, segment), s.elements * 4);
    }
    accumulators_.stream().record().wait();
  } catch (const kernels::DeviceError& error) {
    const MutexLock guard(core_.mutex());
    core_.fail(fmt::format("sums of gradients on the device: {}", error.what()));
    core_.check();
  }
}

void Gradients::add(const Arrival& arrival, int64_t begin, int64_t elements, const std::byte* data) {
  add(std::array{Piece{&arrival, begin, elements, data}});
}

void Gradients::add(std::span<const Piece> pieces) {
  whole_parts_.clear();
  chunk_parts_.clear();
  for (const Piece& piece : pieces) {
    if (device_units_.take_gradients(piece.arrival->unit) || sums_.are_on_device(piece.arrival->unit)) {
      add_there(piece);
    } else {
      forget_sum_there(*piece.arrival);
      cut(piece, lies_whole(piece.arrival->unit) ? whole_parts_ : chunk_parts_);
    }
  }
  work_on(whole_parts_, [&](int64_t i) { add_whole(whole_parts_[i]); });
  if (!chunk_parts_.empty()) add_by_chunk(chunk_parts_);
}

void Gradients::forget_sum_there(const Arrival& arrival) {
  if (setup_.plan.accumulators_device_bytes == 0) return;
  const MutexLock guard(core_.mutex());
  accumulators_.forget(arrival.unit, arrival.segment);
}

void Gradients::add_there(const Piece& piece) {
  const Arrival& arrival = *piece.arrival;
  if (device_units_.take_gradients(arrival.unit)) {
    const MutexLock lock(core_.mutex());
    return device_units_.take_in(arrival, piece.begin, piece.elements, piece.data);
  }
  const int64_t from = setup_.layout.units[arrival.unit].segments[arrival.segment].begin + piece.begin;
  sums_.on_device().take_in(arrival.element, piece.data, setup_.gradient_type(arrival.unit),
                            at(arrival.unit, from), piece.elements, arrival.first);
}

/// Into what a worker takes in at a time: what lies in one chunk; of several ranks' gradients as much.
void Gradients::cut(const Piece& piece, std::vector<Part>& parts) const {
  const int64_t end = piece.begin + piece.elements;
  if (setup_.layout.slices > 1) {
    for (int64_t from = piece.begin; from < end; from += kSharedElements)
      parts.push_back({-1, -1, 0, from, std::min(kSharedElements, end - from), &piece});
    return;
  }
  for_each_part(piece.arrival->unit, piece.arrival->segment, [&](Part part) {
    if (part.in_segment < piece.begin || part.in_segment >= end) return;
    if (part.in_segment + part.elements > end)
      throw std::logic_error("a piece of a gradient ends inside a chunk");
    part.piece = &piece;
    parts.push_back(part);
  });
}

void Gradients::work_on(std::span<const Part> parts, const std::function<void(int64_t)>& work) {
  if (parts.size() == 1) {
    work(0);
  } else if (!parts.empty()) {
    hardware_.executor->parallel_for(std::ssize(parts), work);
  }
}

void Gradients::add_whole(const Part& part) {
  const Arrival& arrival = *part.piece->arrival;
  const Segment& s = setup_.layout.units[arrival.unit].segments[arrival.segment];
  const optim::Element type = setup_.gradient_type(arrival.unit);
  std::byte* const to = at(arrival.unit, s.begin + part.in_segment);
  take_in(part.piece->at(part.in_segment), arrival.element, to, type, part.elements, arrival.first);
  if (part.chunk < 0) return;
  // The CPU that computes beside us would take as long for it now as in step(); a device is waited for then.
  const auto last = [&] {
    const MutexLock lock(core_.mutex());
    return is_last(arrival);
  };
  if (!hardware_.device().shares_host_memory() && last()) {
    squares_.put(part.chunk, part.run, optim::squares_of(to, part.elements, type));
  } else {
    squares_.forget(part.chunk, part.run);
  }
}

void Gradients::finish(const Arrival& arrival) {
  const MutexLock guard(core_.mutex());
  if (setup_.layout.slices > 1) sums_.arrived(arrival.unit, arrival.segment);
  presence_[arrival.unit][arrival.segment] = Presence::there;
}

Gradients::Mark Gradients::mark(int32_t unit, int32_t segment) {
  const MutexLock guard(core_.mutex());
  return {forgotten_, arrivals_[unit][segment]};
}

void Gradients::break_off(const Arrival& arrival, const Mark& of, bool pieces) {
  const MutexLock guard(core_.mutex());
  if (of != Mark{forgotten_, arrivals_[arrival.unit][arrival.segment]}) return;
  --arrivals_[arrival.unit][arrival.segment];
  if (!pieces) return;
  if (is_there(arrival.unit, arrival.segment)) half_added_.emplace_back(arrival.unit, arrival.segment);
  drop(arrival.unit, arrival.segment);
}

void Gradients::require_whole_sums(GroupRange range) {
  const MutexLock guard(core_.mutex());
  for (const auto& [unit, segment] : half_added_) {
    const Segment& s = setup_.layout.units[unit].segments[segment];
    if (!range.has(s.group)) continue;
    throw std::invalid_argument(
        fmt::format("a backward broke off while the gradient of {} was added to that of earlier "
                    "micro-batches, and the sum is lost: clear the gradients (zero_grad) and make the "
                    "micro-batches of this step again",
                    s.name));
  }
}

/// Some of their units' chunks are spilled: a few at a time are brought into memory, added to, and go.
void Gradients::add_by_chunk(std::span<Part> parts) {
  const MutexLock turn(turn_);
  const auto most = static_cast<size_t>(std::min(kBatchMost, staging_.held_most()));
  for (size_t begin = 0; begin < parts.size(); begin += most)
    add_batch(parts.subspan(begin, std::min(most, parts.size() - begin)));
}

void Gradients::add_batch(std::span<Part> parts) {
  const MutexLock lock(core_.mutex());
  const auto spilled = [&](const Part& part) { return setup_.plan.gradients_on_nvme[part.chunk]; };
  try {
    for (Part& part : parts) {
      ChunkState& state = model_.chunks[part.chunk];
      // What the last step used would be read for nothing.
      if (is_empty(setup_.layout.chunks[part.chunk])) core_.store.give_up(state.gradient_extent);
      part.memory = state.gradient != nullptr ? state.gradient : staging_.open(part.chunk);
    }
    for (Part& part : parts) {
      if (spilled(part)) staging_.wait(part.chunk);
      choose_element(part);
    }
    const auto work = [&](int64_t i) {
      const Part& part = parts[i];
      if (part.widen) widen_in_place(part.was, part.memory, setup_.layout.chunks[part.chunk].elements);
      std::byte* to = part.memory + part.in_chunk * optim::bytes(part.element);
      const Arrival& arrival = *part.piece->arrival;
      take_in(part.piece->at(part.in_segment), arrival.element, to, part.element, part.elements,
              arrival.first);
      // While it is in the cache. Where more is added later, that is done again.
      if (spilled(part)) {
        squares_.put(part.chunk, part.run, optim::squares_of(to, part.elements, part.element));
      } else {
        squares_.forget(part.chunk, part.run);
      }
    };
    {
      const Unlocked unlocked(core_.mutex());
      work_on(parts, std::ref(work));
    }
    for (const Part& part : parts) {
      if (!spilled(part)) continue;
      const bool whole = complete(setup_.layout.chunks[part.chunk]);
      staging_.close(part.chunk,
                     whole ? GradientStaging::Closing::complete : GradientStaging::Closing::changed);
    }
  } catch (const EngineFailed&) {
    throw;
  } catch (const std::exception& error) {  // part of the gradient was added: no later step would be right
    const Unit& unit = setup_.layout.units[parts.front().piece->arrival->unit];
    core_.fail(fmt::format("gradients of {}: {}", unit.name, error.what()));
    core_.check();
  }
}

/// A spilled gradient of 2 bytes an element stays that, half the bytes to move, until something is added to
/// it.
void Gradients::choose_element(Part& part) {
  const Arrival& arrival = *part.piece->arrival;
  ChunkState& state = model_.chunks[part.chunk];
  part.was = state.gradient_element;
  if (state.gradient == nullptr) {
    const bool empty = is_empty(setup_.layout.chunks[part.chunk]);
    const bool as_it_came = arrival.first && (empty || part.was == arrival.element);
    state.gradient_element = as_it_came ? arrival.element : setup_.gradient_type(arrival.unit);
    part.widen = !empty && state.gradient_element != part.was;
  }
  part.element = state.gradient_element;
}

/// As far as anybody knows: each of its segments has given as many gradients as the others.
bool Gradients::complete(const Chunk& chunk) const {
  const auto& arrivals = arrivals_[chunk.unit];
  return std::all_of(chunk.runs.begin(), chunk.runs.end(), [&](const Run& run) REQUIRES(engine_mutex) {
    return arrivals[run.segment] == arrivals[chunk.runs.front().segment];
  });
}

bool Gradients::is_empty(const Chunk& chunk) const {
  return std::none_of(chunk.runs.begin(), chunk.runs.end(), [&](const Run& run) REQUIRES(engine_mutex) {
    return is_there(chunk.unit, run.segment);
  });
}

bool Gradients::any() {
  const MutexLock lock(core_.mutex());
  return any_present();
}

bool Gradients::any_present() const {
  const auto is_present = [](Presence presence) { return presence >= Presence::zero; };
  return std::any_of(presence_.begin(), presence_.end(),
                     [&](const auto& unit) { return std::any_of(unit.begin(), unit.end(), is_present); });
}

}  // namespace overspill::engine
