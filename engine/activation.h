// An activation in the engine's keeping (Engine::keep_activation): the bytes of a tensor that autograd saves
// in forward and asks for in backward. They lie in an arena of the host budget, or on NVMe, and come back
// unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace overspill::engine {

/// What was done with activations since the engine was made.
struct ActivationStats {
  int64_t put_bytes = 0;
  int64_t written_bytes = 0;  // to NVMe
  int64_t read_bytes = 0;     // from NVMe
  int64_t demand_reads = 0;   // that began when their tensor was taken
};

class Machine;  // the parts of an engine (calls/machine.h)

/// A hold on the bytes of an activation: while it lives, bytes() is valid and lies in the arena, aligned to 4
/// KiB. Move-only; may outlive the activation and the engine. Its destructor, on any thread, does not throw.
class ActivationHold {
 public:
  ActivationHold() = default;
  ActivationHold(std::shared_ptr<Machine> machine, int64_t number, std::span<std::byte> bytes)
      : machine_(std::move(machine)), number_(number), bytes_(bytes) {}
  ActivationHold(ActivationHold&& other) noexcept { swap(other); }
  ActivationHold& operator=(ActivationHold&& other) noexcept {
    ActivationHold taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~ActivationHold();
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  void swap(ActivationHold& other) noexcept {
    std::swap(machine_, other.machine_);
    std::swap(number_, other.number_);
    std::swap(bytes_, other.bytes_);
  }
  std::shared_ptr<Machine> machine_;
  int64_t number_ = 0;
  std::span<std::byte> bytes_;
};

/// Owns the activation: its destructor, on any thread, gives the bytes up once no hold is left, and does not
/// throw. Move-only; may outlive the engine. A moved-from object owns nothing and may only be destroyed or
/// assigned to.
class Activation {
 public:
  Activation(std::shared_ptr<Machine> machine, int64_t number)
      : machine_(std::move(machine)), number_(number) {}
  Activation(Activation&& other) noexcept { swap(other); }
  Activation& operator=(Activation&& other) noexcept {
    Activation taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Activation();
  /// Waits until the bytes are in memory. From now on the engine reads ahead those that were kept before, the
  /// newest first. Any thread. Throws BudgetError where activations that are held leave no room,
  /// EngineFailed, std::invalid_argument after close().
  ActivationHold hold() const;

 private:
  void swap(Activation& other) noexcept {
    std::swap(machine_, other.machine_);
    std::swap(number_, other.number_);
  }
  std::shared_ptr<Machine> machine_;
  int64_t number_ = 0;
};

}  // namespace overspill::engine
