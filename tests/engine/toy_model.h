// A model for tests of the engine that needs no framework: gradients are a fixed function of the weights as
// forward sees them, the step and the rank, so that a wrong or stale weight changes every later bit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace overspill::testing {

struct ToyStep {
  double loss = 0;
  engine::StepResult result;
};

/// Units of both formats, one frozen, sizes from 3 elements to several chunks.
std::vector<engine::UnitSpec> toy_units();

/// Every weight of the model, by unit and segment, as the initial value.
float toy_initial(int unit, int segment, int64_t element);

optim::AdamConfig toy_group(int group, int step);
inline constexpr int kToyGroups = 2;

/// Fills the engine with the initial weights (bf16 units from fp32, so that lo matters).
void toy_load(engine::Engine& engine);

/// The gradient of element i, given the weight that forward saw.
float toy_gradient(float weight, int unit, int segment, int64_t element, int step, int micro, int rank);

/// True where a segment has no gradient in a step (layers skipped).
bool toy_skips(int unit, int segment, int step, int rank);

/// A segment's weights as whoever leased its unit sees them (bf16 widened).
std::vector<float> toy_leased(const engine::Engine& engine, const engine::Lease& lease, int unit,
                              int segment);

/// Forward of one unit: the sum of the squares of its weights.
double toy_forward(const engine::Engine& engine, const engine::Lease& lease, int unit);

/// Adds a segment's gradient, given the weights that forward saw, unless it has none in this step.
void toy_add_gradient(engine::Engine& engine, const std::vector<float>& seen, int unit, int segment, int step,
                      int micro, int rank);

/// Backward of one unit: adds the gradients of the segments that have one in this step.
void toy_backward(engine::Engine& engine, const engine::Lease& lease, int unit, int step, int micro,
                  int rank);

/// Hyper-parameters of all groups in a step.
std::vector<optim::AdamConfig> toy_groups(int step);

/// One step: forward over all units, backward in reverse with gradients, step().
ToyStep toy_step(engine::Engine& engine, int step, int micro_batches, int rank);

/// Exact fp32 weights and moments, everything (world 1).
std::vector<float> toy_contents(engine::Engine& engine);

/// What weights and moments must be, by the scalar reference, one step after the other. A value: a copy of it
/// is what a checkpoint must bring back.
class ToyReference {
 public:
  /// True where a segment has no gradient in this step.
  using Absent = std::function<bool(int unit, int segment, int rank)>;

  /// Initial weights, moments zero.
  explicit ToyReference(const std::vector<engine::UnitSpec>& units);
  void advance(int step, int micro_batches, double clip, const Absent& absent, int world = 1);
  /// As load_weight(): new weights, moments as they were.
  void assign(int unit, int segment, const std::vector<float>& weights);

  /// As forward sees a segment (toy_leased).
  std::vector<float> seen(int unit, int segment) const;
  /// As toy_contents.
  std::vector<float> contents() const;

 private:
  struct State {
    engine::Format format;
    int group;
    std::vector<float> p, m, v;  // fp32 and frozen: p; bf16: hi and lo
    std::vector<uint16_t> hi;
    std::vector<int16_t> lo;
    int64_t steps = 0;
  };
  std::vector<std::vector<State>> units_;  // by unit and segment
};

/// What toy_contents must give after toy_step, by the scalar reference; of `results` the clip factors are
/// used. With several ranks: what they hold together.
std::vector<float> toy_reference(int steps, int micro_batches, const std::vector<engine::StepResult>& results,
                                 int world = 1);

}  // namespace overspill::testing
