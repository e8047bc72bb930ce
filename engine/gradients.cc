#include "engine/gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

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

/// Takes `elements` of a gradient in: the first of a step is copied, later ones are added.
void take_in(const std::byte* from, bool from_bf16, std::byte* to, bool to_bf16, int64_t elements,
             bool first) {
  if (from_bf16 == to_bf16 && first) {
    std::memcpy(to, from, static_cast<size_t>(elements * (to_bf16 ? 2 : 4)));
  } else if (from_bf16 && to_bf16) {
    optim::accumulate(span_of<uint16_t>(from, elements), span_of<uint16_t>(to, elements));
  } else if (from_bf16 && first) {
    optim::widen(span_of<uint16_t>(from, elements), span_of<float>(to, elements));
  } else if (from_bf16) {
    optim::accumulate(span_of<uint16_t>(from, elements), span_of<float>(to, elements));
  } else {
    optim::accumulate(span_of<float>(from, elements), span_of<float>(to, elements));
  }
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

std::byte* Gradients::at(int32_t unit, int64_t element) const {
  return context_.units[unit].gradients + element * element_bytes(unit);
}

void Gradients::add(int32_t unit, int32_t segment, const void* data, int64_t bytes, std::string_view dtype) {
  const Unit& u = context_.layout.units[unit];
  const Segment& s = u.segments[segment];
  if (!u.trainable()) throw std::invalid_argument(fmt::format("{} is frozen: it takes no gradient", s.name));
  const bool from_bf16 = dtype == "BF16";
  const bool to_bf16 = element_bytes(unit) == 2;
  if ((!from_bf16 && dtype != "F32") || (to_bf16 && !from_bf16)) {
    throw std::invalid_argument(
        fmt::format("the gradient of {} is {}, its weights are {}", s.name, dtype, u.dtype));
  }
  const int64_t from_bytes = from_bf16 ? 2 : 4;
  if (bytes != s.elements * from_bytes) {
    throw std::invalid_argument(fmt::format("the gradient of {} has {} bytes, its {} elements take {}",
                                            s.name, bytes, s.elements, s.elements * from_bytes));
  }
  const bool first = present_[unit][segment] == 0;
  const auto* from = static_cast<const std::byte*>(data);
  const auto piece = [&](int64_t i) {
    const int64_t begin = i * kPieceElements;
    take_in(from + begin * from_bytes, from_bf16, at(unit, s.begin + begin), to_bf16,
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
  const bool bf16 = element_bytes(unit) == 2;
  const auto sum = span_of<float>(send, elements);
  if (bf16) {
    optim::widen(span_of<uint16_t>(receive, elements), sum);
  } else {
    std::memcpy(send, receive, static_cast<size_t>(bytes));
  }
  for (int r = 1; r < world; ++r) {
    if (bf16) {
      optim::accumulate(span_of<uint16_t>(receive + r * bytes, elements), sum);
    } else {
      optim::accumulate(span_of<float>(receive + r * bytes, elements), sum);
    }
  }
  optim::scale(sum, 1.0F / static_cast<float>(world));
  if (bf16) {
    optim::narrow(sum, span_of<uint16_t>(mine, elements));
  } else {
    std::memcpy(mine, send, static_cast<size_t>(bytes));
  }
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
      const optim::Squares part = element_bytes(chunk.unit) == 2
                                      ? optim::squares(span_of<uint16_t>(data, run.elements))
                                      : optim::squares(span_of<float>(data, run.elements));
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
  const std::byte* data = at(unit, s.begin);
  if (element_bytes(unit) == 2) {
    optim::widen(span_of<uint16_t>(data, s.elements), out);
  } else {
    std::memcpy(out.data(), data, static_cast<size_t>(s.elements * 4));
  }
}

}  // namespace overspill::engine
