// A model for tests of the engine that needs no framework: gradients are a fixed function of the weights as
// forward sees them, the step and the rank, so that a wrong or stale weight changes every later bit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/memory/budget.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

namespace overspill::testing {

struct ToyStep {
  double loss = 0;
  engine::StepResult result;
};

/// How the toy's trainable units are kept: all in one format, or bf16 ones in exact and others in fp32.
struct ToyKind {
  optim::Optimizer optimizer{};  // Adam
  engine::UnitFormat format;     // none: both
};

/// Devices that every machine has, and CUDA where there is one (the tests named after it say where not).
std::vector<std::string> toy_devices();

/// For names of tests.
const char* placement_name(engine::Placement placement);

/// One frozen unit among them, sizes from 3 elements to several chunks.
std::vector<engine::UnitSpec> toy_units(const ToyKind& kind = {});

/// Every weight of the model, by unit and segment, as the initial value.
float toy_initial(int unit, int segment, int64_t element);

optim::AdamConfig toy_group(int group, int step);
inline constexpr int kToyGroups = 2;

/// Fills the engine with the initial weights (from fp32, so that what is beside hi matters) and states.
void toy_load(engine::Engine& engine);

/// The gradient of element i, given the weight that forward saw.
float toy_gradient(float weight, int unit, int segment, int64_t element, int step, int micro, int rank);

/// True where a segment has no gradient in a step (layers skipped).
bool toy_skips(int unit, int segment, int step, int rank);

/// A segment's weights as whoever leased its unit sees them, as fp32.
std::vector<float> toy_leased(const engine::Engine& engine, const engine::Lease& lease, int unit,
                              int segment);

/// Elements of a dtype as fp32.
std::vector<float> toy_widened(std::string_view dtype, const std::byte* data, size_t count);

/// A segment's gradient as a framework would hand it over, in the weights' dtype, given the weights that
/// forward saw.
std::vector<std::byte> toy_gradient_bytes(std::string_view dtype, const std::vector<float>& weights, int unit,
                                          int segment, int step, int micro, int rank);

/// Forward of one unit: the sum of the squares of its weights.
double toy_forward(const engine::Engine& engine, const engine::Lease& lease, int unit);

/// Adds a segment's gradient, given the weights that forward saw, unless it has none in this step.
void toy_add_gradient(engine::Engine& engine, const std::vector<float>& seen, int unit, int segment, int step,
                      int micro, int rank);

/// The same, whatever toy_skips says.
void toy_add_gradient_always(engine::Engine& engine, const std::vector<float>& seen, int unit, int segment,
                             int step, int micro, int rank);

/// Backward of one unit: adds the gradients of the segments that have one in this step.
void toy_backward(engine::Engine& engine, const engine::Lease& lease, int unit, int step, int micro,
                  int rank);

/// Hyper-parameters of all groups in a step. One group has decay, momentum in Nesterov's form and the like,
/// the other has not, and maximizes where the optimizer is not Adam.
std::vector<optim::Hyper> toy_groups(int step, optim::Optimizer optimizer = {});

/// One step: forward over all units, backward in reverse with gradients, step().
ToyStep toy_step(engine::Engine& engine, int step, int micro_batches, int rank);

/// The same, the micro-batches passing each unit one after another.
ToyStep toy_step_together(engine::Engine& engine, int step, int micro_batches, int rank);

/// Master weights and states as fp32, everything (world 1).
std::vector<float> toy_contents(engine::Engine& engine);

/// What weights and moments must be, by the scalar reference, one step after the other. A value: a copy of it
/// is what a checkpoint must bring back.
class ToyReference {
 public:
  /// True where a segment has no gradient in this step.
  using Absent = std::function<bool(int unit, int segment, int rank)>;

  /// Initial weights and states.
  explicit ToyReference(const std::vector<engine::UnitSpec>& units, uint64_t rounding_seed = 0);
  void advance(int step, int micro_batches, double clip, const Absent& absent, int world = 1);
  /// As load_weight(): new weights, moments as they were.
  void assign(int unit, int segment, const std::vector<float>& weights);

  /// As forward sees a segment (toy_leased).
  std::vector<float> seen(int unit, int segment) const;
  /// As toy_contents.
  std::vector<float> contents() const;
  /// A segment's gradient in the step that comes next, as the update will see it; empty where it has none.
  std::vector<float> gradient(int unit, int segment, int step, int micro_batches, const Absent& absent,
                              int world = 1) const;

 private:
  struct State {
    optim::Optimizer optimizer;
    engine::UnitFormat format;
    int group;
    int64_t elements = 0;
    uint64_t seed = 0;
    int64_t index = 0;                             // of the first element in the unit
    std::vector<std::vector<uint8_t>> components;  // as the update takes them
    int64_t steps = 0;

    float weight(int64_t i) const;
    float state(int number, int64_t i) const;
    size_t states() const;
    void* data(size_t component) { return components[component].data(); }
  };
  std::vector<std::vector<State>> units_;  // by unit and segment
};

/// What toy_contents must give after toy_step, by the scalar reference; of `results` the clip factors are
/// used. With several ranks: what they hold together.
std::vector<float> toy_reference(int steps, int micro_batches, const std::vector<engine::StepResult>& results,
                                 int world = 1, const ToyKind& kind = {}, uint64_t rounding_seed = 0);

}  // namespace overspill::testing
