// An activation in the engine's keeping (Engine::keep_activation): the bytes of a tensor that autograd saves
// in forward and asks for in backward. They lie in an arena of the host budget, or on NVMe, and come back
// unchanged.
#pragma once

#include <cstddef>
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
  int64_t demand_reads = 0;   // that began when their tensor was asked for
  int64_t wait_ns = 0;        // callers waited for room, or for a tensor that was being read
};

class Machine;  // the parts of an engine (calls/machine.h)

/// Owns the bytes: its destructor, on any thread, gives them up, and does not throw. Move-only; may outlive
/// the engine. A moved-from object owns nothing and may only be destroyed or assigned to.
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
  /// Fills `to`, in host memory, of as many bytes, and waits for them. From now on the engine reads ahead
  /// those that were kept before, the newest first. Any thread, any number of times. Throws EngineFailed,
  /// io::StoreError where the disks have no room for what has to make way, std::invalid_argument after
  /// close() or where the size is another.
  void read(std::span<std::byte> to) const;

 private:
  void swap(Activation& other) noexcept {
    std::swap(machine_, other.machine_);
    std::swap(number_, other.number_);
  }
  std::shared_ptr<Machine> machine_;
  int64_t number_ = 0;
};

}  // namespace overspill::engine
