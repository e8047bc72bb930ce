// A small network trained on batches that ranks divide: what they learn together is what one process learns
// on the whole batch. For the tests of ranks, and bench-ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/partition/layout.h"

namespace overspill::testing {

/// What a caller does in the middle of a step.
struct Moments {
  std::function<void()> before_layer = [] {};  // of forward and of backward, before its weights are asked for
  std::function<void()> after_forward = [] {};  // and before backward
};

struct BatchModel {
  int layers = 6;
  int width = 48;
  int batch = 12;  // of all ranks together
  optim::Format format = optim::Format::exact;

  /// Layer l is unit l: its matrix and its bias. y = tanh(W x + b), layer by layer.
  std::vector<engine::UnitSpec> units() const;
  int64_t parameters() const { return int64_t{layers} * width * (width + 1); }

  void load(engine::Engine& engine) const;
  /// Forward and backward of this rank's samples, gradients handed over, and step(). Returns this rank's
  /// share of the mean loss: the sum over the ranks is the loss of the batch.
  double train(engine::Engine& engine, int step, int rank, int world, const Moments& moments = {}) const;
};

}  // namespace overspill::testing
