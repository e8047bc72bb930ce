#include "engine/gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "cpu_optim/gradient.h"

namespace overspill::engine {
namespace {

constexpr int64_t kPieceElements = 512 * 1024;  // of a gradient that several workers take in

template <class T>
std::span<T> span_of(std::byte* data, int64_t elements) {
  return {reinterpret_cast<T*>(data), static_cast<size_t>(elements)};
}

template <class T>
std::span<const T> span_of(const void* data, int64_t elements) {
  return {static_cast<const T*>(data), static_cast<size_t>(elements)};
}

/// Calls use(T()) with the type of an element.
template <class Use>
auto with_type(optim::Element element, Use use) {
  switch (element) {
    case optim::Element::bf16:
      return use(uint16_t());
    case optim::Element::fp16:
      return use(optim::Fp16());
    case optim::Element::fp32:
      break;
  }
  return use(float());
}

/// to = from or to += from, as fp32.
void widen(optim::Element element, const std::byte* from, std::span<float> to, bool first) {
  const auto elements = static_cast<int64_t>(to.size());
  with_type(element, [&]<class T>(T) {
    if (!first) return optim::accumulate(span_of<T>(from, elements), to);
    if constexpr (std::is_same_v<T, float>) {
      std::memcpy(to.data(), from, to.size_bytes());
    } else {
      optim::widen(span_of<T>(from, elements), to);
    }
  });
}

/// Takes `elements` of a gradient in: the first of a step is copied, later ones are added. `to` is as wide as
/// `from`, or fp32.
void take_in(const std::byte* from, optim::Element from_element, std::byte* to, optim::Element to_element,
             int64_t elements, bool first) {
  if (from_element != to_element) return widen(from_element, from, span_of<float>(to, elements), first);
  if (first) {
    std::memcpy(to, from, static_cast<size_t>(elements * optim::bytes(to_element)));
    return;
  }
  with_type(to_element,
            [&]<class T>(T) { optim::accumulate(span_of<T>(from, elements), span_of<T>(to, elements)); });
}

std::optional<optim::Element> element_of(std::string_view dtype) {
  if (dtype == "BF16") return optim::Element::bf16;
  if (dtype == "F16") return optim::Element::fp16;
  if (dtype == "F32") return optim::Element::fp32;
  return std::nullopt;
}

}  // namespace

Gradients::Gradients(Context& context)
    : context_(context),
      exchange_(context.host_budget, context.plan.exchange_bytes, "gradients exchanged between ranks"),
      by_chunk_(context.chunks.size()) {
  for (const Unit& unit : context.layout.units) present_.emplace_back(unit.segments.size());
}

int64_t Gradients::element_bytes(int32_t unit) const {
  return gradient_element_bytes(context_.layout.units[unit].format, context_.config.gradient_accumulation);
}

optim::Element Gradients::element(int32_t unit) const {
  return gradient_element(*context_.layout.units[unit].format, context_.config.gradient_accumulation);
}

std::byte* Gradients::at(int32_t unit, int64_t element) const {
  return context_.units[unit].gradients + element * element_bytes(unit);
}

void Gradients::add(int32_t unit, int32_t segment, const void* data, int64_t bytes, std::string_view dtype) {
  const Unit& u = context_.layout.units[unit];
  const Segment& s = u.segments[segment];
  if (!u.trainable()) throw std::invalid_argument(fmt::format("{} is frozen: it takes no gradient", s.name));
  const std::optional<optim::Element> from_element = element_of(dtype);
  const optim::Element to_element = element(unit);
  if (!from_element || (from_element != to_element && to_element != optim::Element::fp32)) {
    throw std::invalid_argument(
        fmt::format("the gradient of {} is {}, its weights are {}", s.name, dtype, u.dtype));
  }
  const int64_t from_bytes = optim::bytes(*from_element);
  if (bytes != s.elements * from_bytes) {
    throw std::invalid_argument(fmt::format("the gradient of {} has {} bytes, its {} elements take {}",
                                            s.name, bytes, s.elements, s.elements * from_bytes));
  }
  const bool first = present_[unit][segment] == 0;
  const auto* from = static_cast<const std::byte*>(data);
  const auto piece = [&](int64_t i) {
    const int64_t begin = i * kPieceElements;
    take_in(from + begin * from_bytes, *from_element, at(unit, s.begin + begin), to_element,
            std::min(kPieceElements, s.elements - begin), first);
  };
  const int64_t pieces = (s.elements + kPieceElements - 1) / kPieceElements;
  if (pieces < 2) {
    if (pieces == 1) piece(0);
  } else {
    context_.resources.executor->parallel_for(pieces, piece);
  }
  present_[unit][segment] = 1;
}

void Gradients::clear() {
  for (auto& unit : present_) std::fill(unit.begin(), unit.end(), uint8_t{0});
}

void Gradients::reduce() {
  if (context_.layout.world == 1) return;
  zero_absent();
  for (const Chunk& chunk : context_.layout.chunks) {
    if (context_.layout.units[chunk.unit].trainable()) reduce_chunk(chunk.begin, chunk.elements, chunk.unit);
  }
  reduce_presence();
}

void Gradients::zero_absent() {
  for (size_t u = 0; u < present_.size(); ++u) {
    const Unit& unit = context_.layout.units[u];
    const auto index = static_cast<int32_t>(u);
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      const int64_t bytes = unit.segments[s].elements * element_bytes(index);
      if (present_[u][s] == 0 && bytes > 0) {
        std::memset(at(index, unit.segments[s].begin), 0, static_cast<size_t>(bytes));
      }
    }
  }
}

/// An all-to-all of this chunk's slices, then an fp32 sum in rank order: one result on every transport
/// (DESIGN 8).
void Gradients::reduce_chunk(int64_t chunk_begin, int64_t elements, int32_t unit) {
  const int world = context_.layout.world;
  const int64_t shard = context_.layout.units[unit].shard_elements;
  const int64_t bytes = elements * element_bytes(unit);
  std::byte* send = exchange_.data();
  std::byte* receive = exchange_.data() + exchange_.bytes() / 2;
  for (int r = 0; r < world; ++r) {
    std::memcpy(send + r * bytes, at(unit, r * shard + chunk_begin), static_cast<size_t>(bytes));
  }
  const auto all = static_cast<size_t>(world * bytes);
  context_.resources.communicator->all_to_all({send, all}, {receive, all});
  std::byte* mine = at(unit, context_.layout.rank * shard + chunk_begin);
  const optim::Element kind = element(unit);
  const auto sum = span_of<float>(send, elements);
  for (int r = 0; r < world; ++r) widen(kind, receive + r * bytes, sum, r == 0);
  optim::scale(sum, 1.0F / static_cast<float>(world));
  with_type(kind, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, float>) {
      std::memcpy(mine, send, static_cast<size_t>(bytes));
    } else {
      optim::narrow(sum, span_of<T>(mine, elements));
    }
  });
}

void Gradients::reduce_presence() {
  std::vector<double> counts;
  for (const auto& unit : present_) counts.insert(counts.end(), unit.begin(), unit.end());
  context_.resources.communicator->all_reduce_sum(counts);
  size_t next = 0;
  for (auto& unit : present_) {
    for (uint8_t& present : unit) present = counts[next++] > 0 ? 1 : 0;
  }
}

GradientSummary Gradients::summarize() {
  const auto chunks = static_cast<int64_t>(context_.layout.chunks.size());
  context_.resources.executor->parallel_for(chunks, [&](int64_t i) {
    const Chunk& chunk = context_.layout.chunks[i];
    optim::Squares total;
    const int64_t begin = context_.layout.global_begin(chunk);
    for (const Run& run : chunk.runs) {
      if (!present(chunk.unit, run.segment)) continue;
      const std::byte* data = at(chunk.unit, begin + run.begin);
      const optim::Squares part = with_type(
          element(chunk.unit), [&]<class T>(T) { return optim::squares(span_of<T>(data, run.elements)); });
      total.sum += part.sum;
      total.finite = total.finite && part.finite;
    }
    by_chunk_[i] = total;
  });
  double sums[2] = {0, 0};  // squares, chunks that are not finite
  for (const optim::Squares& chunk : by_chunk_) {
    sums[0] += chunk.sum;
    sums[1] += chunk.finite ? 0 : 1;
  }
  context_.resources.communicator->all_reduce_sum(sums);
  const bool finite = sums[1] == 0;
  return {finite ? sums[0] : std::numeric_limits<double>::infinity(), finite};
}

void Gradients::read(int32_t unit, int32_t segment, std::span<float> out) const {
  const Segment& s = context_.layout.units[unit].segments[segment];
  if (static_cast<int64_t>(out.size()) != s.elements) {
    throw std::invalid_argument(
        fmt::format("{} has {} elements, room for {} was given", s.name, s.elements, out.size()));
  }
  if (!present(unit, segment)) throw std::invalid_argument(fmt::format("{} has no gradient now", s.name));
  widen(element(unit), at(unit, s.begin), out, true);
}

}  // namespace overspill::engine
