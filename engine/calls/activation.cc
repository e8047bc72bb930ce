// Activations in the engine's keeping (engine/activation.h).
#include "engine/activation.h"

#include <optional>

#include "engine/calls/machine.h"
#include "engine/engine.h"

namespace overspill::engine {

std::optional<Activation> Engine::keep_activation(std::span<const std::byte> bytes) {
  Machine& m = machine();
  const MutexLock lock(m.core.mutex());
  const std::optional<int64_t> number = m.activations.put(bytes);
  if (!number) return std::nullopt;
  return Activation(machine_, *number);
}

Activation::~Activation() {
  if (machine_ == nullptr || !machine_->process.here()) return;
  const MutexLock lock(machine_->core.mutex());
  machine_->activations.drop(number_);
}

void Activation::read(std::span<std::byte> to) const {
  machine_->check_process();
  const MutexLock lock(machine_->core.mutex());
  machine_->activations.take(number_, to);
}

}  // namespace overspill::engine
