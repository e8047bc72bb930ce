// A gradient that comes in parts, in the order of its elements, so that nobody has it whole. What lies in
// whole chunks is taken in at once; the rest of a part waits for the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/gradients/gradient_intake.h"
#include "engine/gradients/gradients.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

/// One thread uses it.
class GradientParts {
 public:
  /// Of one rank, on the host. No other gradient of the segment comes before this one has ended.
  GradientParts(const Setup& setup, GradientIntake& intake, Gradients& gradients, int32_t unit,
                int32_t segment, optim::Element element);
  GradientParts(const GradientParts&) = delete;
  GradientParts& operator=(const GradientParts&) = delete;

  /// The elements that follow those given before. Throws std::invalid_argument where there are not so many,
  /// or where an element is given in part.
  void add(std::span<const std::byte> data);
  /// Throws std::invalid_argument where elements are missing.
  void finish();
  /// In place of finish(), as Gradients::break_off.
  void break_off();

 private:
  /// Elements until the piece that is being put together ends.
  int64_t missing() const;
  int64_t waiting() const { return std::ssize(rest_) / width_; }

  GradientIntake& intake_;
  Gradients& gradients_;
  const Segment& segment_;
  const Gradients::Arrival arrival_;
  const Gradients::Mark mark_;
  const int64_t width_;
  int64_t taken_ = 0;            // elements
  std::vector<std::byte> rest_;  // the elements behind them, less than a chunk
};

}  // namespace overspill::engine
