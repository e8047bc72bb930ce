// Gradients in flight: one array a trainable unit, in the unit's flat space, from their arrival in backward
// to the update that uses them up.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cpu_optim/gradient.h"
#include "engine/schedule/context.h"

namespace overspill::engine {

/// Of the final, accumulated, reduced gradients of all ranks; the same bits on every rank.
struct GradientSummary {
  double squares = 0;  // infinite where a gradient is not finite
  bool finite = true;
};

class Gradients {
 public:
  explicit Gradients(Context& context);

  /// Adds a segment's gradient: `data` is `bytes` of the segment's elements, contiguous, in host memory. The
  /// dtype is the unit's, or "F32". The caller has made sure that no update of the unit is pending. Throws
  /// std::invalid_argument on a size or dtype that does not fit.
  void add(int32_t unit, int32_t segment, const void* data, int64_t bytes, std::string_view dtype);

  bool present(int32_t unit, int32_t segment) const { return present_[unit][segment] != 0; }
  void clear();

  /// Sums over the ranks (mean), zeros where a rank has none; afterwards this rank's slice is final and
  /// present() is true where any rank had one. Collective.
  void reduce();

  /// Squares of what is there now, by chunk, added in global order. Collective.
  GradientSummary summarize();

  /// Copies a segment's gradient, as fp32, to `out` (segment's elements of it). World 1.
  void read(int32_t unit, int32_t segment, std::span<float> out) const;

 private:
  int64_t element_bytes(int32_t unit) const;
  optim::Element element(int32_t unit) const;  // of a trainable one
  std::byte* at(int32_t unit, int64_t element) const;
  void reduce_presence();
  void reduce_chunk(int64_t chunk_begin, int64_t elements, int32_t unit);
  void zero_absent();

  Context& context_;
  std::vector<std::vector<uint8_t>> present_;  // by unit and segment
  HostMemory exchange_;                        // world > 1: two buffers of `world` chunks, fp32
  std::vector<optim::Squares> by_chunk_;
};

}  // namespace overspill::engine
