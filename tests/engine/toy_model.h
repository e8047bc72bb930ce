// A model for tests of the engine that needs no framework: gradients are a fixed function of the weights as
// forward sees them, the step and the rank, so that a wrong or stale weight changes every later bit.
#pragma once

#include <cstdint>
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

/// One step: forward over all units, backward in reverse with gradients, step().
ToyStep toy_step(engine::Engine& engine, int step, int micro_batches, int rank);

/// Exact fp32 weights and moments, everything (world 1).
std::vector<float> toy_contents(engine::Engine& engine);

/// What toy_contents must give after toy_step, by the scalar reference; of `results` the clip factors are
/// used. With several ranks: what they hold together.
std::vector<float> toy_reference(int steps, int micro_batches, const std::vector<engine::StepResult>& results,
                                 int world = 1);

}  // namespace overspill::testing
