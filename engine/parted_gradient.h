// A gradient that its caller hands over in parts (Engine::begin_gradient), since it has no memory for all of
// it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace overspill::engine {

class GradientParts;  // gradients/gradient_parts.h
class Machine;        // the parts of an engine (calls/machine.h)

/// Move-only; may outlive the engine. One thread at a time. Where finish() has not returned, its destructor
/// leaves the segment without a gradient, unless no part was given, or gradients were cleared or another one
/// came since. If earlier micro-batches had given one, the next step is refused until gradients are cleared.
/// It does not throw.
class PartedGradient {
 public:
  PartedGradient(std::shared_ptr<Machine> machine, std::unique_ptr<GradientParts> parts);
  PartedGradient(PartedGradient&& other) noexcept;
  PartedGradient& operator=(PartedGradient&& other) noexcept;
  ~PartedGradient();
  /// The elements that follow those given before, in host memory, in the order of the segment's memory.
  /// Throws std::invalid_argument where there are not so many or after the end, or after close(),
  /// io::StoreError, EngineFailed.
  void add(std::span<const std::byte> data);
  /// From now on the segment has the gradient. Throws std::invalid_argument where elements are missing.
  void finish();
  /// What the destructor does.
  void break_off() noexcept;

 private:
  GradientParts& parts() const;
  std::shared_ptr<Machine> machine_;
  std::unique_ptr<GradientParts> parts_;  // null: it has ended
};

}  // namespace overspill::engine
